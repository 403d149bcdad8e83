"""`baton doctor`: what is wrong with this machine or with a stack, line by line, and what to type next."""
