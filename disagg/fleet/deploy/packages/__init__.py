"""The Python packages of a host.

requirements  the packages that disagg requires, for a host's roles and platform
wheels        which wheels of a local folder meet them
environment   the Python environment that a host should have, or a Refusal
"""
