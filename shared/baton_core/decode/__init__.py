"""The decode side: prealloc queue -> transfer queue -> waiting -> running.

`phases` is the table, `prealloc` and `transfer` the queues that consume agreed polls, `planning` the next batch, `core`
joins them. A request without a room is computed here alone (colocated).
"""
