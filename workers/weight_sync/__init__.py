"""Weight sync: bring a train group's weights to rollout workers.

`WeightSender` is the train side, `WeightReceiver` the rollout side, and `sync_protocol` is what they agree on. Each
transport is one file with both halves: a `Transport` that sends, and the `Message` that it has the receivers handle.
"""

from typing import TYPE_CHECKING

from dispatch.exports import lazy_exports

if TYPE_CHECKING:  # the table of what this package exports, which `lazy_exports` reads too
    from workers.weight_sync.receiver_calls import call_manager as call_manager
    from workers.weight_sync.receiver_calls import receiver_groups as receiver_groups
    from workers.weight_sync.sync_protocol import SyncReport as SyncReport
    from workers.weight_sync.sync_protocol import WeightSyncError as WeightSyncError
    from workers.weight_sync.weight_receiver import WeightReceiver as WeightReceiver
    from workers.weight_sync.weight_sender import WeightSender as WeightSender
else:  # lazy: a driver imports `WeightReceiver` through `RolloutWorker`, and must not pay for torch
    __all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
