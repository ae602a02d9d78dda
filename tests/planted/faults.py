"""Small faults, each planted in one line of a copy of the tree: the tests must notice every one.

A fault's tests are in the order in which they are run, the quickest first. What none of them notices is a test that is
missing, or code that nothing needs.
"""

from typing import NamedTuple


class Fault(NamedTuple):
    """A change of one line.

    Attributes:
        name: What is wrong with it.
        path: The file, from the root of the tree.
        line: The line, without its indentation; it stands once in the file.
        instead: What is put in its place.
        tests: Arguments of pytest, one run for each.
    """

    name: str
    path: str
    line: str
    instead: str
    tests: tuple[str, ...]


_STEP, _SERVED = "toolkit/strategies/step/", "toolkit/strategies/parameter_servers/"
_LOSSES, _OWN = "tests/strategies/test_losses.py", "tests/strategies/test_own_steps.py"
_VIEW, _DRAWS, _MOMENTS = (f"tests/strategies/test_{name}.py" for name in ("view", "exact_draws", "moments"))
_LOGS, _ROWS, _BATCH = (f"tests/strategies/test_{name}.py" for name in ("logs", "rows", "whole_batch"))
_EMPTY, _ZERO1 = "tests/strategies/test_empty_shares.py", "tests/strategies/test_zero1.py"
_SHARDED, _SPLIT = "tests/strategies/test_sharded_variable.py", "tests/strategies/test_batch_split.py"
_OPTIMIZER, _LOCAL = "tests/strategies/test_optimizer_step.py", "tests/strategies/test_local_steps.py"
_STORE, _POSITION, _RESUME = (f"tests/training/test_{name}.py" for name in ("checkpoints", "data_position", "resume"))
_BUDGET, _SIMULATED, _STALL = (f"tests/launch/test_{name}.py" for name in ("decide", "simulated", "stall"))

FAULTS = (
    Fault(
        "a replica's weight is dropped",
        _STEP + "gradients.py",
        "factor = tf.cast(weight > 0, gradient.dtype) if number in self.weighted else weight",
        "factor = tf.cast(weight > 0, gradient.dtype)",
        (_LOSSES, _OWN),
    ),
    Fault(
        "a replica's weight is squared",
        _STEP + "gradients.py",
        "factor = tf.cast(weight > 0, gradient.dtype) if number in self.weighted else weight",
        "factor = tf.cast(weight > 0, gradient.dtype) if number in self.weighted else weight * weight",
        (_LOSSES, _OWN),
    ),
    Fault(
        "a weighted gradient is weighted twice",
        _STEP + "gradients.py",
        "factor = tf.cast(weight > 0, gradient.dtype) if number in self.weighted else weight",
        "factor = weight",
        (_OWN, _OPTIMIZER),
    ),
    Fault(
        "a neighbour's weight is taken",
        _STEP + "share.py",
        "self._weight = tf.math.divide_no_nan(self.count, self.total_count)",
        "self._weight = tf.math.divide_no_nan(tf.roll(self.counts, 1, 0)[this_step.place], self.total_count)",
        (_LOSSES, _OWN),
    ),
    Fault(
        "the local count stands for the batch's",
        _STEP + "share.py",
        'return self._in_step("total_count", lambda: tf.reduce_sum(counts))',
        'return self._in_step("total_count", lambda: counts[this_step.place] * this_step.count)',
        (_LOSSES, _OWN),
    ),
    Fault(
        "gradients aren't exchanged",
        _STEP + "gradients.py",
        "self.sent.complete(self.numbers, summed(self.sent.of_shares(self.numbers)))",
        "self.sent.complete(self.numbers, self.sent.of_shares(self.numbers))",
        (_LOSSES,),
    ),
    Fault(
        "gradients are exchanged twice",
        _STEP + "gradients.py",
        "self.sent.complete(self.numbers, summed(self.sent.of_shares(self.numbers)))",
        "self.sent.complete(self.numbers, summed(summed(self.sent.of_shares(self.numbers))))",
        (_LOSSES,),
    ),
    Fault(
        "a mean stands for the sum of replicas",
        _STEP + "collectives.py",
        "return tf.add_n([tf.cast(value, dtype) for value in values])",
        "return tf.add_n([tf.cast(value, dtype) for value in values]) / len(values)",
        (_LOSSES,),
    ),
    Fault(
        "a mask is forgotten in a mean's divisor",
        _STEP + "share.py",
        'elif reduction in ("mean", "sum_over_batch_size") and mask is not None:',
        'elif reduction == "mean" and mask is not None:',
        (_LOSSES,),
    ),
    Fault(
        "weights of examples are forgotten in a mean's divisor",
        _STEP + "share.py",
        'if reduction == "mean_with_sample_weight" and _given(sample_weight, mask):',
        'if reduction == "mean_with_sample_weight" and _given(mask):',
        (_LOSSES + " -m slow",),
    ),
    Fault(
        "rows of the wrong replica are taken",
        _STEP + "share.py",
        "before = tf.cumsum(tf.gather(counts, order), exclusive=True)",
        "before = tf.cumsum(tf.gather(counts, order))",
        (_DRAWS, _VIEW),
    ),
    Fault(
        "a replica without examples counts its copy",
        _STEP + "share.py",
        "return x if self.has_own is None else tf.where(self.has_own, x, tf.zeros_like(x))",
        "return x",
        (_EMPTY,),
    ),
    Fault(
        "a short batch counts as a full one in a mean",
        _STEP + "share.py",
        "return share.weight * this_step.count",
        "return tf.ones([], tf.float64)",
        (_LOGS, _OWN),
    ),
    Fault(
        "the gradient of gathered rows isn't divided by the weight",
        _STEP + "share.py",
        "return tf.math.divide_no_nan(own, tf.cast(self.exchanged_weight, own.dtype))",
        "return own",
        (_VIEW,),
    ),
    Fault(
        "the gradient of cut rows isn't weighted",
        _STEP + "share.py",
        "return self.rows_of_all(upstream * tf.cast(self.exchanged_weight, upstream.dtype))",
        "return self.rows_of_all(upstream)",
        (_VIEW,),
    ),
    Fault(
        "a sum that a step returns is weighted",
        _STEP + "share.py",
        "whole = collectives.all_reduce(tf.math.multiply_no_nan(exact, tf.sign(own) if of.is_sum else own))",
        "whole = collectives.all_reduce(tf.math.multiply_no_nan(exact, own))",
        (_LOGS,),
    ),
    Fault(
        "a draw's offset is left out",
        _STEP + "draws.py",
        "start = _int64(self.share.first) * (size // tf.maximum(_int64(self.share.count), 1))",
        "start = tf.zeros([], tf.int64) * size",
        (_DRAWS,),
    ),
    Fault(
        "a draw begins at the block, and not in it",
        _STEP + "draws.py",
        "found = tf.reshape(tf.slice(flat, [start % each], [size]), shape)",
        "found = tf.reshape(tf.slice(flat, [0 * start], [size]), shape)",
        (_DRAWS,),
    ),
    Fault(
        "truncated normals skip as others do",
        _STEP + "draws.py",
        "tries = 1 if _is_compiled() else _TRIES * _in_a_block(dtype)",
        "tries = 1",
        (_DRAWS,),
    ),
    Fault(
        "what is drawn by a state is alike on all replicas",
        _STEP + "draws.py",
        "return first, second if second is None else (second + this_step.replica * 0x9E37_79B1) % 2**31",
        "return first, second",
        ("tests/strategies/test_draws.py", _DRAWS),
    ),
    Fault(
        "the gradient of a normalisation's sums isn't weighted",
        _STEP + "moments.py",
        "return tf.math.divide_no_nan(summed(upstream * weight), weight)",
        "return summed(upstream)",
        (_MOMENTS,),
    ),
    Fault(
        "a variance is of this replica's own mean",
        _STEP + "moments.py",
        "return count * at + difference, squares + (2.0 * difference + count * at) * at, count",
        "return count * at + difference, squares, count",
        (_MOMENTS,),
    ),
    Fault(
        "what a mask leaves out is normalised by",
        _STEP + "moments.py",
        "own = own if kept is None else tf.where(kept, own, 0)",
        "own = own if kept is None else tf.where(kept, own, own)",
        (_MOMENTS,),
    ),
    Fault(
        "a branch that rows decide is left to replicas",
        _STEP + "trial.py",
        "if not all(each.is_alike for each in found.branches):  # Replicas might take different ones.",
        "if found is None:",
        (_VIEW, _OWN),
    ),
    Fault(
        "a loss that is no mean is left to replicas",
        _STEP + "trial.py",
        "if not self.sums and not all(each.is_mean for each in scalars):",
        "if not self.sums and not scalars:",
        (_OWN, _VIEW),
    ),
    Fault(
        "attention among examples is trusted",
        _STEP + "trusted.py",
        "return all(axis > 0 for axis in layer._attention_axes or ())",
        "return True",
        ("tests/strategies/test_trusted.py",),
    ),
    Fault(
        "a loss that is a sum is averaged",
        _STEP + "whole_batch.py",
        "return tf.math.divide_no_nan(value, tf.cast(share.weight, value.dtype))",
        "return value",
        (_BATCH, _OWN),
    ),
    Fault(
        "overflow is found by each replica for itself",
        _STEP + "optimizer.py",
        "return finite_alike(sent.values, variables, optimizer) if scales else sent.values",
        "return sent.values",
        (_ZERO1, "tests/strategies/test_sharded_weights.py", _OPTIMIZER),
    ),
    Fault(
        "replicas' rows are in the order of their ids",
        _STEP + "collectives.py",
        "return sorted(range(count), key=lambda replica: (replica % in_process, replica // in_process))",
        "return sorted(range(count), key=lambda replica: (replica // in_process, replica % in_process))",
        ("tests/conformance/test_exact_arithmetic.py -k workers",),
    ),
    Fault(
        "the first shares of a batch aren't the larger ones",
        "toolkit/strategies/batches.py",
        "before = min(share, more) if numbers else tf.minimum(tf.cast(share, tf.int64), tf.cast(more, tf.int64))",
        "before = 0 * share",
        (_SPLIT,),
    ),
    Fault(
        "a checkpoint is found complete without its sum",
        "toolkit/training/checkpoints.py",
        'if found != manifest["sha256"]:',
        'if not manifest["sha256"]:',
        (_STORE,),
    ),
    Fault(
        "a checkpoint's manifest isn't checked",
        "toolkit/training/checkpoints.py",
        "if claimed != _manifest_sum(manifest):",
        "if not claimed:",
        (_STORE,),
    ),
    Fault(
        "one checkpoint fewer is kept",
        "toolkit/training/checkpoints.py",
        "for name in self.names()[: -self.keep]:",
        "for name in self.names()[: -self.keep + 1]:",
        (_STORE,),
    ),
    Fault(
        "a replaced checkpoint is looked for under its name only",
        "toolkit/training/checkpoints.py",
        "return replaced if replaced.exists() and not path.exists() else path",
        "return path",
        (_STORE,),
    ),
    Fault(
        "a checkpoint is written where it is found",
        "toolkit/training/checkpoints.py",
        "left = entry.name.startswith((_WRITING, _REMOVING))",
        "left = entry.name.startswith(_REMOVING)",
        (_STORE,),
    ),
    Fault(
        "a position is restored one step late",
        "toolkit/training/restore.py",
        'return checkpoint, Position(**{**checkpoint.metadata["position"], "step": checkpoint.step})',
        'return checkpoint, Position(**{**checkpoint.metadata["position"], "step": checkpoint.step + 1})',
        (_RESUME,),
    ),
    Fault(
        "a shuffle is drawn once more than before the stop",
        "toolkit/training/data_position.py",
        "for _ in range(iterators):",
        "for _ in range(iterators + 1):",
        (_POSITION,),
    ),
    Fault(
        "a restart counts twice",
        "toolkit/launch/supervisor/decide.py",
        "budget.in_vain += counts",
        "budget.in_vain += 2 * counts",
        (_BUDGET, _SIMULATED),
    ),
    Fault(
        "progress doesn't free restarts",
        "toolkit/launch/supervisor/decide.py",
        "self.in_vain = 0",
        "pass",
        (_BUDGET, _SIMULATED),
    ),
    Fault(
        "the shorter limit ends a job whose threads compute",
        "toolkit/launch/supervisor/state.py",
        'longer = Stall(max(set_or_unknown, learnt.limit), last, "")',
        'longer = Stall(min(set_or_unknown, learnt.limit), last, "")',
        (_STALL, _SIMULATED),
    ),
    Fault(
        "the limit is the shortest of the phases that were seen",
        "toolkit/launch/supervisor/state.py",
        "longest[kind] = max(seconds, longest.get(kind, 0.0))",
        "longest[kind] = min(seconds, longest.get(kind, seconds))",
        (_STALL, _SIMULATED),
    ),
    Fault(
        "a process that waits for the others has a limit of its own",
        "toolkit/launch/supervisor/state.py",
        'kinds = {task.phase.get("kind", "") for task in concerned} - {status.WAITING}',
        'kinds = {task.phase.get("kind", "") for task in concerned}',
        (_STALL,),
    ),
    Fault(
        "what is late for long counts as usual",
        "toolkit/launch/agent/connection.py",
        "self._least[-1] = min(self._least[-1], delay)",
        "self._least[-1] = delay",
        ("tests/launch/test_cause.py",),
    ),
    Fault(
        "a GPU's share of a node's cores is forgotten",
        "toolkit/launch/queues/slurm.py",
        "cores = max(room, gpus * share)",
        "cores = max(room, gpus)",
        ("tests/launch/backends/test_slurm_script.py",),
    ),
    Fault(
        "a token's proof is compared by its length",
        "toolkit/launch/backends/rendezvous.py",
        "return isinstance(found, str) and hmac.compare_digest(_bytes(found), _bytes(_proof(token, role, *numbers)))",
        "return isinstance(found, str) and len(found) == len(_proof(token, role, *numbers))",
        ("tests/launch/backends", "tests/launch/test_rendezvous_launch.py"),
    ),
    Fault(
        "an array of a checkpoint lies where its neighbour is",
        "toolkit/training/arrays_file.py",
        "begin, end = end, end + each.nbytes",
        "begin, end = 0, each.nbytes",
        (_STORE,),
    ),
    Fault(
        "a worker keeps what it had of the chief's array",
        "toolkit/strategies/processes/agreement.py",
        "content[:] = np.asarray(received).view(np.uint8)[: len(content)]",
        "np.asarray(received)",
        ("tests/multiprocess/test_sharded_weights_of_workers.py -k dense",),
    ),
    Fault(
        "a layer that was made frozen never trains",
        _STEP + "sharded_weights.py",
        "self._make_shards(trainable=tf.as_dtype(self._dtype).is_floating)",
        "self._make_shards(trainable=self.trainable)",
        ("tests/strategies/test_sharded_weights.py -k made_frozen",),
    ),
    Fault(
        "a shard of the second group is another's",
        _STEP + "sharded_variable.py",
        "begin = replica_id % self.count * size",
        "begin = replica_id * size",
        (_SHARDED, "tests/strategies/test_sharded_weights.py"),
    ),
    Fault(
        "after a step of fewer rows a script goes on from it",
        "toolkit/strategies/check/fewer_rows.py",
        "now.put_back()",
        "pass",
        ("tests/strategies/check/test_fewer_rows.py",),
    ),
    Fault(
        "a gradient's staleness is always none",
        _SERVED + "ledger.py",
        "return tf.cast(ticket - version, tf.int32) + APPLIED",
        "return tf.cast(version - version, tf.int32) + APPLIED",
        ("tests/strategies/parameter_servers/test_ledger.py",),
    ),
    Fault(
        "what was applied is counted again",
        _SERVED + "ledger.py",
        "ledger.clear()",
        "ledger.version()",
        ("tests/strategies/parameter_servers/test_ledger.py",),
    ),
    Fault(
        "a sum that the shares of a round return is weighted",
        _SERVED + "rounds.py",
        "whole = sum(part * (1 if kind.is_sum else weight) for part, weight in zip(exact, weights, strict=True))",
        "whole = sum(part * weight for part, weight in zip(exact, weights, strict=True))",
        ("tests/strategies/parameter_servers/test_totals.py",),
    ),
    Fault(
        "the shares of a round count alike",
        _SERVED + "rounds.py",
        "weights = examples / examples.sum()",
        "weights = (examples > 0) / (examples > 0).sum()",
        ("tests/strategies/parameter_servers/test_served_steps.py", "tests/conformance/test_battery.py"),
    ),
)
