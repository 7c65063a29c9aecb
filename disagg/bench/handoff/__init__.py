"""A hand-off of KV that no model computed, beside other ways to move the same bytes: for `disagg bench handoff`.

Two processes, on two machines or on one. `control` is the thread of words between them, `door` who may connect, `run`
takes the turns, and `handoff`, `bare_socket` and `http_json` are the ways.
"""
