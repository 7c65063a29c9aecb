from tests.fleet.deploy.conftest import deployed, once_deployed

__all__ = ["deployed", "once_deployed"]
