"""The small process of a host with several models: it starts and ends their processes, and states what is loaded.

    python -m disagg.keeper --config hosts.toml --host NAME [--state FOLDER]

It holds the host's port and forwards nothing: requests go to the port of a model's own process, which the keeper
states. It never imports a framework.

policy     which model is loaded next, and which ones go for it; pure
weights    the files of models: what is there, what they need of memory, pull, delete
child      the process of one model: start, watch, order, end
kept       one model, and what that is to others
processes  what is loaded, what goes, what fails
keeper     what is asked for: load, unload, keep, pin, pull, delete
app        the HTTP application
"""
