# SPDX-License-Identifier: Apache-2.0
"""Faults of training on several ranks."""

from tests.planted_faults.fault import Fault, integration

_DDP = integration("flash_clip_ranks::ranks_train_as_one_process[ddp dpddp-2]")
_SHARDED = integration("flash_clip_ranks::ranks_train_as_one_process[fsdp2-2]")
_REPLICATED = integration("flash_clip_ranks::ranks_train_as_one_process[fsdp2-4]")

FAULTS = [
    Fault(
        "noise_on_every_rank",
        "optimizers/ddp.py",
        "return self.rank == 0",
        "return True",
        "The noise of a DDP step is that of all ranks together.",
        _DDP,
    ),
    Fault(
        "noise_on_no_rank",
        "optimizers/ddp.py",
        "return self.rank == 0",
        "return self.rank == self.ranks",
        "A DDP step has no noise.",
        _DDP,
    ),
    Fault(
        "mean_over_one_rank",
        "optimizers/optimizer.py",
        "self.accumulated_iterations * self.ranks) if",
        "self.accumulated_iterations) if",
        "The mean over the samples of all ranks is divided by the batch size of one.",
        _DDP,
    ),
    Fault(
        "ranks_refuse_by_themselves",
        "optimizers/ddp.py",
        "((fewest, most),) = self.agreement.settle(error, [",
        "if error is not None:\n            raise error\n        ((fewest, most),) = self.agreement.settle(None, [",
        "A rank that refuses a step leaves the others waiting, or stepping.",
        _DDP,
    ),
    Fault(
        "ranks_differ",
        "optimizers/ddp.py",
        "        self.agreement.check_same(self.description())\n",
        "",
        "Ranks whose settings differ train together.",
        _DDP,
    ),
    Fault(
        "shards_have_the_same_noise",
        "optimizers/fsdp.py",
        "{number} {rank}",
        "{number}",
        "The shards of all ranks have the same noise, and their differences none.",
        _SHARDED,
    ),
    Fault(
        "replicas_have_noise_each",
        "optimizers/fsdp.py",
        "return all(parameter.device_mesh.get_local_rank(i) == 0 for i in self._replicated.get(parameter, ()))",
        "return True",
        "Each replica of a shard adds noise.",
        _REPLICATED,
    ),
    Fault(
        "net_of_a_shard",
        "optimizers/fsdp.py",
        "return Limit(int(samples), total, by_parameter, own.bound)",
        "return own",
        "The net compares a shard of all ranks' sum with the samples of one rank.",
        _SHARDED,
    ),
    Fault(
        "refusals_are_not_heard",
        "agreement.py",
        "dist.all_reduce(reduced, dist.ReduceOp.MAX)",
        "dist.all_reduce(reduced, dist.ReduceOp.MIN)",
        "A rank does not hear that another one has refused.",
        _DDP,
    ),
    Fault(
        "poisson_leaves_out_empty_batches",
        "agreement.py",
        "        sampler.__class__ = EveryStepSampler",
        "        pass",
        "A rank without samples leaves out a step that the others take.",
        _DDP,
    ),
    Fault(
        "ranks_prove_new_operations_alone",
        "module/call_proofs.py",
        "is_new = situation is not None and self.is_unproved(call, situation, output)",
        "is_new = False",
        "Under FSDP2 a forward by other operations than the proved ones is accepted.",
        integration("check_ranks::ranks_are_checked_together"),
    ),
    Fault(
        "ranks_leave_a_proof_alone",
        "proof/situations.py",
        "            ranks.end(error)\n            raise",
        "            raise",
        "A rank that refuses in a proof leaves the others waiting in a forward.",
        integration("check_ranks::ranks_are_checked_together"),
    ),
]
