# SPDX-License-Identifier: Apache-2.0
"""Faults of training on several ranks, and of virtual GPUs and ranks that are simulated."""

from tests.planted_faults.fault import Texts

FAULTS: Texts = {
    "clipping/optimizers/ddp.py": [
        (
            "The noise of a DDP step is that of all ranks together.",
            "return self.rank == 0",
            "return True",
            "integration/flash_clip_ranks::ranks_train_as_one_process[ddp dpddp-2]",
        ),
        (
            "A DDP step has no noise.",
            "return self.rank == 0",
            "return self.rank == self.ranks",
            "integration/flash_clip_ranks::ranks_train_as_one_process[ddp dpddp-2]",
        ),
        (
            "A rank that refuses a step leaves the others waiting, or stepping.",
            "((fewest, most),) = self._settle(error, [",
            "if error is not None:\n            raise error\n        ((fewest, most),) = self._settle(None, [",
            "integration/flash_clip_ranks::ranks_train_as_one_process[ddp dpddp-2]",
        ),
        (
            "Ranks whose settings differ train together.",
            "        self.agreement.check_same(self.description())\n",
            "",
            "integration/flash_clip_ranks::ranks_train_as_one_process[ddp dpddp-2]",
        ),
        (
            "A scheduler on one rank leaves samples with a larger bound than the noise is made for.",
            "            if low < high:\n",
            "            if False:\n",
            "integration/flash_clip_ranks::ranks_train_as_one_process[ddp dpddp-2]",
        ),
        (
            "Ranks that train different parameters add up sums of different ones.",
            "if names[0] < names[1]:",
            "if False:",
            "integration/flash_clip_ranks::ranks_train_as_one_process[ddp dpddp-2]",
        ),
    ],
    "clipping/optimizers/optimizer.py": [
        (
            "The mean over the samples of all ranks is divided by the batch size of one.",
            "self.accumulated_iterations * self.ranks) if",
            "self.accumulated_iterations) if",
            "integration/flash_clip_ranks::ranks_train_as_one_process[ddp dpddp-2]",
        ),
    ],
    "clipping/module/hooks.py": [
        (
            "DDP reduces gradients of a proof once the model has changed.",
            "            self._detach()\n            self.enable_hooks()",
            "            self.remove_hooks()\n            self.enable_hooks()",
            "integration/flash_clip_ranks::ranks_train_as_one_process[ddp dpddp-2]",
        ),
    ],
    "clipping/optimizers/fsdp.py": [
        (
            "Under FSDP2 the optimizer does not follow which parameters are trained.",
            "            self._follow_model()\n",
            "",
            "integration/flash_clip_ranks::ranks_train_as_one_process[fsdp2-2]",
        ),
        (
            "The shards of all ranks have the same noise, and their differences none.",
            "{number} {rank}",
            "{number}",
            "integration/flash_clip_ranks::ranks_train_as_one_process[fsdp2-2]",
        ),
        (
            "Each replica of a shard adds noise.",
            "return all(parameter.device_mesh.get_local_rank(i) == 0 for i in self._replicated.get(parameter, ()))",
            "return True",
            "integration/flash_clip_ranks::ranks_train_as_one_process[fsdp2-4]",
        ),
        (
            "The net compares a shard of all ranks' sum with the samples of one rank.",
            "return Limit(int(samples), total, by_parameter, own.bound)",
            "return own",
            "integration/flash_clip_ranks::ranks_train_as_one_process[fsdp2-2]",
        ),
    ],
    "clipping/proof/situations.py": [
        (
            "Ranks that shard different trained parameters wait for one another.",
            "if names[0] != names[1]:",
            "if False:",
            "integration/flash_clip_ranks::ranks_train_as_one_process[fsdp2-2]",
        ),
        (
            "A rank that refuses in a proof leaves the others waiting in a forward.",
            "            ranks.end(error)\n            raise",
            "            raise",
            "integration/check_ranks::ranks_are_checked_together",
        ),
    ],
    "clipping/agreement.py": [
        (
            "A rank does not hear that another one has refused.",
            "dist.all_reduce(reduced, dist.ReduceOp.MAX)",
            "dist.all_reduce(reduced, dist.ReduceOp.MIN)",
            "integration/flash_clip_ranks::ranks_train_as_one_process[ddp dpddp-2]",
        ),
    ],
    "clipping/sampling.py": [
        (
            "A rank without samples leaves out a step that the others take.",
            "        sampler.__class__ = EveryStepSampler",
            "        pass",
            "integration/flash_clip_ranks::ranks_train_as_one_process[ddp dpddp-2]",
        ),
    ],
    "clipping/module/call_proofs.py": [
        (
            "Under FSDP2 a forward by other operations than the proved ones is accepted.",
            "is_new = situation is not None and self.is_unproved(call, situation, output)",
            "is_new = False",
            "integration/check_ranks::ranks_are_checked_together",
        ),
    ],
    "virtual_gpu/store.py": [
        (
            "A counter that all ranks raise waits for the others forever.",
            "amount * self._world_size",
            "amount",
            "unit/virtual_devices::a_store_acts_as_if_all_ranks_did_the_same",
        ),
        (
            "What another rank would have set is an id of NCCL.",
            'return self._by_pattern.get(_NUMBER.sub("#", key), _UNIQUE_ID)',
            "return self._by_pattern.get(key, _UNIQUE_ID)",
            "unit/virtual_devices::a_store_acts_as_if_all_ranks_did_the_same",
        ),
        (
            "A store loses what was appended before.",
            'self._values.get(key, b"") + (value',
            'b"" + (value',
            "unit/virtual_devices::a_store_acts_as_if_all_ranks_did_the_same",
        ),
        (
            "A key that has another value is set.",
            '.decode(errors="replace") == expected',
            '.decode(errors="replace") != expected',
            "unit/virtual_devices::a_store_acts_as_if_all_ranks_did_the_same",
        ),
        (
            "A store has all keys as soon as it has one.",
            "return all(key",
            "return any(key",
            "unit/virtual_devices::a_store_acts_as_if_all_ranks_did_the_same",
        ),
        (
            "A key that is gone was deleted.",
            "self._values.pop(key, None) is not None",
            "self._values.pop(key, None) is None",
            "unit/virtual_devices::a_store_acts_as_if_all_ranks_did_the_same",
        ),
    ],
    "virtual_gpu/simulated_rank.py": [
        (
            "The rank of a second machine takes a GPU that it does not have.",
            "self.rank % self.local_world_size",
            "self.rank % self.world_size",
            "unit/virtual_devices::a_simulated_rank_has_torchruns_variables",
        ),
        (
            "The number of a machine is that of a GPU.",
            '"GROUP_RANK": str(self.rank // self.local_world_size)',
            '"GROUP_RANK": str(self.rank % self.local_world_size)',
            "unit/virtual_devices::a_simulated_rank_has_torchruns_variables",
        ),
        (
            "The rank 4 of 4 is simulated.",
            "if not 0 <= rank < world_size",
            "if not 0 <= rank <= world_size",
            "unit/virtual_devices::a_simulated_rank_has_torchruns_variables",
        ),
        (
            "A rank that is given twice is simulated twice.",
            "sorted(set(ranks)) or [0]",
            "sorted(ranks) or [0]",
            "unit/virtual_devices::a_simulated_rank_has_torchruns_variables",
        ),
        (
            "Twelve ranks stand on machines of eight.",
            "        while world_size % local:\n            local -= 1",
            "        pass",
            "unit/virtual_devices::machines_have_equally_many_ranks",
        ),
        (
            "The rank of a program's own address is not its rank.",
            'rank = int(query.get("rank", default.rank))',
            "rank = default.rank",
            "unit/virtual_devices::a_rendezvous_has_the_rank_of_its_address",
        ),
    ],
    "virtual_gpu/devices.py": [
        (
            "A small GPU's context takes as much as an H200's.",
            "_CONTEXT_OF_H200 * threads // _THREADS_OF_H200",
            "_CONTEXT_OF_H200",
            "unit/virtual_devices::memory_and_number_of_gpus_are_limited",
        ),
        (
            "MI300X is no GPU at all.",
            "kind.lower().startswith",
            "kind.startswith",
            "unit/virtual_devices::a_gpu_of_amd_is_named_so_in_any_case",
        ),
    ],
    "virtual_gpu/process.py": [
        (
            "A virtual GPU may have less memory than its context.",
            "find_gpu(kind).context_memory + _MIN_MEMORY",
            "_MIN_MEMORY",
            "unit/virtual_devices::memory_and_number_of_gpus_are_limited",
        ),
        (
            "64 GPUs are refused.",
            "1 <= count <= _MAX_DEVICES",
            "1 <= count < _MAX_DEVICES",
            "unit/virtual_devices::memory_and_number_of_gpus_are_limited",
        ),
        (
            "A TiB is refused, and said to be allowed.",
            "smallest <= memory <= _MAX_MEMORY",
            "smallest <= memory < _MAX_MEMORY",
            "unit/virtual_devices::memory_and_number_of_gpus_are_limited",
        ),
        (
            "The least memory is refused, and said to be allowed.",
            "smallest <= memory <= _MAX_MEMORY",
            "smallest < memory <= _MAX_MEMORY",
            "unit/virtual_devices::memory_and_number_of_gpus_are_limited",
        ),
        (
            "A program ends while a thread is about to run.",
            "while idle_checks < 2 and",
            "while idle_checks < 1 and",
            "unit/virtual_devices::the_end_waits_briefly_and_a_fork_not_at_all",
        ),
        (
            "A thread with a bracket in its name never runs.",
            '.rpartition(")")[2].split()[0]',
            '.partition(")")[2].split()[0]',
            "unit/virtual_devices::the_state_of_a_thread_is_read_after_its_name",
        ),
        (
            "A forked child waits for threads that it does not have.",
            "    if os.getpid() != pid:\n        return",
            "    if os.getpid() != pid:\n        pass",
            "unit/virtual_devices::the_end_waits_briefly_and_a_fork_not_at_all",
        ),
        (
            "Each child of a child has another cache.",
            'chosen.removesuffix("_virtual_gpu") + "_virtual_gpu"',
            'chosen + "_virtual_gpu"',
            "unit/virtual_devices::inductor_s_cache_is_separate_also_in_children",
        ),
    ],
    "virtual_gpu/requirements.py": [
        (
            "Why a trial failed is said to be a traceback.",
            'rpartition("\\n")[2]',
            'partition("\\n")[0]',
            "unit/doctor::how_a_trial_ends",
        ),
        (
            "A trial that says nothing is a remedy of no words.",
            "_TRIAL_REFUSED and ran.stdout.strip()",
            "_TRIAL_REFUSED",
            "unit/doctor::how_a_trial_ends",
        ),
    ],
    "virtual_gpu/collectives.py": [
        (
            "Gathered objects are one object.",
            "[_copy(value) for _ in range(ranks)]",
            "[value for _ in range(ranks)]",
            "unit/virtual_devices::a_simulated_rank_gathers_copies_of_its_object",
        ),
        (
            "A job of one rank is said to read what other ranks give.",
            "            if ranks > 1:\n                _count_rank_read()",
            "            _count_rank_read()",
            "unit/virtual_devices::a_simulated_rank_gathers_copies_of_its_object",
        ),
    ],
}
