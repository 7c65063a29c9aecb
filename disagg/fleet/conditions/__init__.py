"""What a host must have for its engine, stated once: deploy refuses by it, doctor reports it, a plan shows it. Pure.

table   the conditions: system, engine and device, driver and cards, disk, service manager, Pythons
memory  whether the model fits
"""
