"""The Python packages of a host.

requirements  the packages that disagg requires, for a host's engine and platform
locks         their versions, hashes and sizes, locked per engine and platform
wheels        which wheels of a local folder meet them
environment   the Python environment that a host should have, or a Refusal
"""
