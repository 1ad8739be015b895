# SPDX-License-Identifier: Apache-2.0
"""Planning: what fits on a GPU, from runs of the program on virtual GPUs.

configuration    a program and its virtual GPU
virtual_run      one run in a separate process, new or forked, and its outcome
run_process      the process of a run; changes: the changes of a suggestion
fork_server      the process that runs are forked from
arguments        values for the program's arguments
search           the largest value that fits, by few runs
runs             many runs at once, stored in runs.jsonl
verdict          whether one configuration fits, and how to make it fit
table            the cells of a plan: the largest value for each mode and GPU
draws            the probability of running out of memory with Poisson sampling
replay           a recorded run with other settings; replay_process is its process
directory        files that a plan writes besides its runs: plan.json, a profile
python           plans of a function; call is the program that runs it
report           a plan in plain words
"""
