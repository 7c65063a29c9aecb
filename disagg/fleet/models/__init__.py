"""Models on the hosts: what lies where, one download from the hub, and copies from host to host.

inventory           which models a host has, whole or in part, and what identifies them
inventory_program   looks that up; runs on the hosts, never imported
sources             what each host of a fleet needs
pull                what is to be downloaded and copied (pure), and doing it
copy                one model from a host to another over HTTP, every file by its SHA-256
serve_program       the one end of a copy, fetch_program the other; run on the hosts, never imported
hub_program         downloads from the hub; runs on a host in its deployed environment
remove              takes models away
"""
