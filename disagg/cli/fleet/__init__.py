"""The commands that set up and operate the hosts of hosts.toml, one module each.

trust       show SSH host keys and add them to known_hosts
deploy      plan, deploy, rollback, uninstall
models      models pull, list, rm
lifecycle   start, stop, restart
rollout     rollout: deploy, and restart host by host
status      health of every server
watch       report when a host goes down and comes back
doctor      examine hosts and links
logs        the servers' logs in one stream
remote      ssh to one host, exec on many
token       token show, rotate
machines/   bootstrap, prune
"""
