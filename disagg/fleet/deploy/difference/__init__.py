"""What a deployment changes on a host, for whoever reads its plan.

content     what the host's current release and its environment hold
difference  the target state compared with it
"""
