"""placeholder"""
from src.tracking.base import NoTracker
class WandbTracker(NoTracker):
    def __init__(self, mode="auto", init_timeout_seconds=30, **kw): super().__init__(**kw)
