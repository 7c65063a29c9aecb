"""`disagg demo`: a fleet on this machine that answers one request in three ways.

flow        the demo from beginning to end; comparison: the three ways side by side
models/     the demo's models, trained and with random weights
prompt      the prompt of the demo; hosts.toml: its fleet
"""
