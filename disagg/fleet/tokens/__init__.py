"""The fleet's secret: a token on this machine, and the same one on every host.

here      the token's file on this machine: made once, adopted from the hosts, replaced by a rotation
there     whose tokens the hosts have: this machine's, or those of another clone or operator
rotation  replaces the token everywhere while the fleet serves
"""
