"""Weight sync: bring a train group's weights to rollout workers.

`WeightSender` is the train side, `WeightReceiver` the rollout side, and `protocol` is what they agree on. Each
transport is one file with both halves: a `Transport` that sends, and the `Message` that it has the receivers handle.
"""

from typing import TYPE_CHECKING

from dispatch.exports import lazy_exports

if TYPE_CHECKING:
    from workers.weight_sync.receiver_calls import call_manager, receiver_groups
    from workers.weight_sync.sync_protocol import SyncReport, WeightSyncError
    from workers.weight_sync.weight_receiver import WeightReceiver
    from workers.weight_sync.weight_sender import WeightSender

__all__ = ["SyncReport", "WeightReceiver", "WeightSender", "WeightSyncError", "call_manager", "receiver_groups"]

_HOMES = {
    "SyncReport": "workers.weight_sync.sync_protocol",
    "WeightReceiver": "workers.weight_sync.weight_receiver",
    "WeightSender": "workers.weight_sync.weight_sender",
    "WeightSyncError": "workers.weight_sync.sync_protocol",
    "call_manager": "workers.weight_sync.receiver_calls",
    "receiver_groups": "workers.weight_sync.receiver_calls",
}

if not TYPE_CHECKING:
    # Lazy: a driver imports `WeightReceiver` through `RolloutWorker`, and must not pay for torch.
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
