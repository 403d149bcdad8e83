"""`baton bench`: what a client sees, what a handoff costs, who disturbs whom, and how others do under the same load."""
