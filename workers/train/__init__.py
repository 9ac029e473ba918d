"""Training of a policy by reinforcement learning: what every backend shares, and the group that drives the ranks.

On the driver, `RayTrainGroup` (train_group.py) is the proxy of the ranks. Their workers derive from one another:

`TrainWorker` (train_worker.py): what the group calls. Abstract, also for workers without a model of ours.
`ModelWorker` (model_worker.py): the life of a `TrainModel`: it is created, saved, sent, offloaded and restored.
`PolicyTrainWorker` (policy_worker.py): one step of GRPO or PPO, on any backend.
`FSDPTrainWorker`, `MegatronTrainWorker` (workers/fsdp, workers/megatron): process groups and the model of a backend.
The latter is a `MegatronWorker` as well.
"""
