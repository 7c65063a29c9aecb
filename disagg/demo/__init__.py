"""`disagg demo`: a fleet on this machine that answers one request in three ways.

flow        the demo from beginning to end
models/     its models, trained and with random weights; prompt.txt: what they continue; hosts.toml: its fleet
"""
