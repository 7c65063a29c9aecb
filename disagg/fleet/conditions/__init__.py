"""What a host must have for its engine, stated once: deploy refuses by it, doctor reports it, a plan shows it. Pure.

table    the conditions, and what a host does not meet
machine  system, engine and device, driver and cards, disk, service manager
python   the Pythons that an environment can be built with
memory   whether the model fits
"""
