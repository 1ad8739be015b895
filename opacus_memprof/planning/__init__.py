# SPDX-License-Identifier: Apache-2.0
"""Planning: what fits on a GPU, from runs of the program on virtual ones.

configuration    a program and its virtual GPU
virtual_run      one run in a process of its own, new or forked, and its outcome
changes          in that process: what a suggestion changes, and what Opacus was set up with
arguments        values for the program's arguments
grid             the cells of a plan, the least change first
search           the largest value that fits, by few runs
runs             many runs at once, kept in runs.jsonl
verdict          whether one configuration fits, and what would make it fit
table            the largest value for each mode and GPU
poisson, draws   how probable it is that memory runs out where batch sizes are drawn
replay           a recorded run with other settings; replay_process is its process
content          what plan.json holds
directory        what a plan leaves beside its runs
python           plans of a function; call is the program that calls it
report           a plan in plain words
"""
