"""A fleet on this machine for as long as a block runs.

running    starts it, and stops it however the block ends
ports      the same fleet on other ports
simulated  the same fleet with simulated hosts
"""
