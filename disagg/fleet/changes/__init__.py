"""Who may change a host, so that two commands never change one at the same time.

lock          one command at a time per host, whichever machine it comes from
tokens        whose token a host has
pending       a release that was deployed and does not run yet
"""
