"""The prefill side: bootstrap queue -> waiting -> (chunked) forward -> inflight -> done.

`phases` is the table, `queue` the two queues that consume agreed polls, `planning` chooses the next chunk batch, `core`
joins them: events in, effects out.
"""
