"""Deploying to hosts: facts -> plan (pure) -> apply. The same plan twice changes nothing the second time.

layout        where things lie on a host
facts         what a machine is and has: one probe, one round trip
requirements  what disagg requires, for a host's roles and platform; wheels: which of a local folder that takes
environment   the python environment a host should have, or why it cannot
models        where a host reads its model from
package       the disagg package as files
release       all that a host should have, and the hash that names it
steps         what a plan is made of; scripts: what its steps run
plan          facts and what should be -> steps, or refusals
lock          one deployment at a time per host
apply         carries a plan out on a machine
deployment    all hosts of a fleet at the same time
"""
