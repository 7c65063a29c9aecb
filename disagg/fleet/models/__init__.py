"""Models on the hosts: an inventory, one download from the hub, and copies from host to host.

inventory           which models hosts require and have, complete or partial; removes them
inventory_program   reads that; runs on the hosts, never imported
pull                what has to come from where; carries that out
copy                one model from a host to another over HTTP, every file by its SHA-256
serve_program       the sending end of a copy, fetch_program the receiving end; run on the hosts, never imported
hub_program         downloads from the hub; runs on a host in its deployed environment
"""
