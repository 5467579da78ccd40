"""A pipeline in time, from the order of tasks and their dependencies alone.

    start(task) = max(end of the previous task on its IPU, end of each task it waits for, + comm if on another IPU)

Independent of `ipujax.lowering.schedules`, as its oracle: it shares only the names of tasks.
"""

from __future__ import annotations


def waits_for(task, num_stages, all_tasks):
    """(stage, micro-batch, kind) of the tasks that `task` waits for; kinds are the letters of `letters`."""
    stage, j, kind = task
    if kind == "F":
        return [(stage - 1, j, "F")] if stage > 0 else []
    if kind == "W":
        return [(stage, j, "I")]
    next_stage = [(stage + 1, j, "B" if (stage + 1, j, "B") in all_tasks else "I")] if stage + 1 < num_stages else []
    return [(stage, j, "F"), *next_stage]


def letters(task):
    """A `Task` as (stage, micro-batch, one of "F", "B", "I", "W")."""
    name = task.kind.name
    return (task.stage, task.micro_batch, {"BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}.get(name, name[0]))


def simulate(lists, num_stages, cost, comm=0):
    """Start and end of each task of each IPU's list; `cost[stage][kind]` is how long one takes.

    Raises:
        ValueError: a deadlock.
    """
    ipu_of = {task: ipu for ipu, tasks in enumerate(lists) for task in tasks}
    times = {}
    clock = [0] * len(lists)
    position = [0] * len(lists)
    while len(times) < len(ipu_of):
        num_started = len(times)
        for ipu, tasks in enumerate(lists):
            while position[ipu] < len(tasks):
                task = tasks[position[ipu]]
                awaited_tasks = waits_for(task, num_stages, ipu_of)
                if not all(awaited in times for awaited in awaited_tasks):
                    break
                arrivals = [times[awaited][1] + comm * (ipu_of[awaited] != ipu) for awaited in awaited_tasks]
                start = max([clock[ipu], *arrivals])
                clock[ipu] = start + cost[task[0]][task[2]]
                times[task] = (start, clock[ipu])
                position[ipu] += 1
        if len(times) == num_started:
            raise ValueError("deadlock")
    return times


def makespan(lists, num_stages, cost, comm=0):
    return max(end for _, end in simulate(lists, num_stages, cost, comm).values())
