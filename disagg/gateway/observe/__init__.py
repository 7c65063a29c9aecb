"""What happens to requests, for those who watch: metrics, history and the live view.

events     the events of a request, as frozen values
observers  passes each event on to every observer
"""
