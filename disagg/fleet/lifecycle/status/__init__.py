"""The state of every server, and why one is down.

health       the state of every server by GET /health; http_get: one GET
host_status  what is known of one server
whole        the state of a whole-request host, from its list of models
comparison   of healthy servers, with each other and with the code and settings here
verdicts     what `disagg verify` found exact
diagnose     why a host does not serve, read from its machine over SSH
"""
