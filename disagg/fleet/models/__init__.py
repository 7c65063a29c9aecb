"""Models on the hosts: an inventory, one download from the hub, and copies from host to host.

inventory           which models a host has, complete or partial, and what identifies them
inventory_program   reads that; runs on the hosts, never imported
sources             the model that each host requires
plan                plans downloads and copies; pure
pull                carries the plan out
copy                one model from a host to another over HTTP, every file by its SHA-256
serve_program       the sending end of a copy, fetch_program the receiving end; run on the hosts, never imported
hub_program         downloads from the hub; runs on a host in its deployed environment
remove              removes models
"""
