# ruff: noqa: E501
"""Bugs as a careless colleague makes them, for `run.py`: by area and file, with the tests that should notice.

`old` stands once in the file, and `new` takes its place. Tests are arguments of pytest: those of the file, unless a bug
has its own. Where code has moved, change the path above its bugs; where it has changed, `old` and `new`.
"""

from typing import NamedTuple


class Bug(NamedTuple):
    """`equivalent` says why no test can notice it: it is the same in all that is promised."""

    name: str
    old: str
    new: str
    tests: str | None = None
    equivalent: str | None = None


class File(NamedTuple):
    path: str
    tests: str
    bugs: list[Bug]


AREAS: dict[str, list[File]] = {
    "losses": [
        File(
            "mheads/losses/normalize.py",
            "tests/losses/test_normalize.py",
            [
                Bug(
                    "the wins of a member are summed over members",
                    "wins = assignment.sum(1, keepdim=True)",
                    "wins = assignment.sum(0, keepdim=True)",
                ),
                Bug("a member that won nothing divides by 0", "wins.where(wins > 0, 1.0)", "wins"),
                Bug(
                    "weights of wins add to M instead of B",
                    "* assignment.shape[1]  # in this order",
                    "* assignment.shape[0]  # in this order",
                ),
            ],
        ),
        File(
            "mheads/losses/ensemble_loss.py",
            "tests/losses/test_normalize.py",
            [
                Bug(
                    "a schedule forgets that it needs the whole batch",
                    "base_loss=base_loss, **kept)",
                    "base_loss=base_loss)",
                ),
                Bug(
                    "the sample weights of a plain function are ignored",
                    "weights = ones_or(sample_weights, value.detach())",
                    "weights = ones_or(None, value.detach())",
                    tests="tests/losses/test_losses.py",
                ),
                Bug(
                    "scores learn from examples of sample weight 0",
                    "learned = ones_or(sample_weights, won) * score_losses",
                    "learned = score_losses",
                    tests="tests/losses/test_with_scores.py -k best",
                ),
                Bug(
                    "a loss that changes forgets its scores",
                    '"masks", "score_weight")',
                    '"masks")',
                    tests="tests/losses/test_with_scores.py -k over_training",
                ),
                Bug(
                    "the mean is over members",
                    "return self.total / self.losses.shape[1]",
                    "return self.total / self.losses.shape[0]",
                    tests="tests/losses/test_losses.py",
                ),
            ],
        ),
        File(
            "mheads/losses/winners.py",
            'tests/losses/test_losses.py tests/losses/test_kin_of_mcl.py -k "not fit and not engine and not loop and not evaluated"',
            [
                Bug("one winner whatever k", "[:k], 1.0)", "[:1], 1.0)"),
                Bug(
                    "ties are ordered along the batch",
                    "by_key = ties.argsort(dim=0, stable=True)",
                    "by_key = ties.argsort(dim=1, stable=True)",
                ),
                Bug(
                    "the highest losses win",
                    "by_loss = losses.gather(0, by_key).argsort(dim=0, stable=True)",
                    "by_loss = losses.gather(0, by_key).argsort(dim=0, stable=True, descending=True)",
                ),
                Bug(
                    "a member whose sample weight is 0 may win",
                    "losses = losses.masked_fill(sample_weights == 0, torch.inf)",
                    "losses = losses.clone()",
                ),
                Bug(
                    "somebody wins the example that nobody may learn from",
                    "return chosen if sample_weights is None else chosen * (sample_weights > 0)",
                    "return chosen",
                ),
            ],
        ),
        File(
            "mheads/losses/mixture_density.py",
            "tests/losses/test_with_scores.py -k components",
            [
                Bug(
                    "components are equally likely",
                    "joint = member_scores.log_weights(outputs, like=log_densities) +",
                    "joint = 0 +",
                ),
                Bug(
                    "the sample weights are ignored",
                    "ones_or(sample_weights, log_densities.detach())",
                    "ones_or(None, log_densities.detach())",
                ),
            ],
        ),
        File(
            "mheads/problems/densities.py",
            'tests/losses/test_with_scores.py -k "voronoi or place"',
            [
                Bug("cells end at the next hypothesis", "(border + here) / 2 - here", "border - here"),
                Bug("kernels are not cut off", "(probability + kernel - volume)", "(probability + kernel)"),
                Bug(
                    "of hypotheses at one place one counts",
                    "same = centre == here",
                    "same = torch.arange(len(centre))[:, None] == nearest",
                ),
            ],
        ),
        File(
            "mheads/problems/densities.py",
            "tests/problems/test_hypotheses.py -k kernels",
            [
                Bug("the least likely kernel is chosen", "grid[max(range", "grid[min(range"),
                Bug(
                    "kernels are not in the units of the targets",
                    "math.log(self.scales[density]) + _logs(self.units)",
                    "math.log(self.scales[density]) + _logs(())",
                ),
            ],
        ),
        File(
            "mheads/problems/regression.py",
            "tests/problems/test_hypotheses.py -k 'trajectories or units'",
            [
                Bug(
                    "the first point is taken for the last",
                    "distances[..., -1]]).amin(1)",
                    "distances[..., 0]]).amin(1)",
                ),
                Bug(
                    "a member alone answers without the mean of the targets",
                    "nested_values.rebuild(outputs, [answers * std + mean, *others])",
                    "nested_values.rebuild(outputs, [answers * std, *others])",
                ),
                Bug(
                    "its logarithm of the variance stays that of normalised targets",
                    "others[0] = others[0] + 2 * std.log()",
                    "pass",
                ),
                Bug(
                    "distortion is a mean over values",
                    "distortion=self.num_values * self._squares",
                    "distortion=self._squares",
                ),
                Bug("answers are in the units of training", "answers = answers * std + mean", "answers = answers"),
            ],
        ),
        File(
            "mheads/losses/mcl.py",
            'tests/losses/test_losses.py tests/losses/test_kin_of_mcl.py -k "not fit and not engine and not loop and not evaluated"',
            [
                Bug(
                    "the mixture is not weighted by the sample weights",
                    "assignment = (best + ce_weight) * weights",
                    "assignment = best * weights + ce_weight",
                ),
                Bug(
                    "the mixture under wins is not weighted by the sample weights",
                    "normalize_assignment(best * weights, normalize) + ce_weight * weights",
                    "normalize_assignment(best * weights, normalize) + ce_weight",
                    tests="tests/losses/test_normalize.py",
                ),
            ],
        ),
        File(
            "mheads/losses/relaxed.py",
            'tests/losses/test_kin_of_mcl.py -k "not fit"',
            [
                Bug(
                    "a member alone gives a part away",
                    "share = epsilon * (num_others > 0).to(fixed.dtype)",
                    "share = epsilon * (num_others >= 0).to(fixed.dtype)",
                ),
                Bug("the others share by M", "share / num_others.clamp_min(1)", "share / len(best)"),
            ],
        ),
        File(
            "mheads/losses/evolving.py",
            'tests/losses/test_kin_of_mcl.py -k "not fit"',
            [
                Bug("k falls late where until has no exact float", " + 1e-9))", "))"),
                Bug(
                    "divided by k where fewer may learn", "best / best.sum(0).clamp_min(1)", "best / (k or len(fixed))"
                ),
            ],
        ),
        File(
            "mheads/losses/annealed.py",
            'tests/losses/test_kin_of_mcl.py -k "not fit"',
            [
                Bug("the softmin is over the batch", ").softmax(0).masked_fill(", ").softmax(1).masked_fill("),
                Bug(
                    "the floor is reached one iteration late",
                    "if part >= 1 or first <= floor",
                    "if part > 1 or first <= floor",
                ),
                Bug(
                    "an example that nobody may learn from is NaN",
                    ".softmax(0).masked_fill(weights == 0, 0.0)",
                    ".softmax(0)",
                ),
            ],
        ),
        File(
            "mheads/losses/confident.py",
            "tests/losses/test_confident.py",
            [
                Bug(
                    "winners have the lowest cross-entropy",
                    "won = assign(fixed - beta * far.detach(), k, sample_weights, ties)",
                    "won = assign(fixed, k, sample_weights, ties)",
                ),
                Bug("winners are pulled to equal probabilities too", "beta * (1 - won) * far", "beta * far"),
            ],
        ),
        File(
            "mheads/losses/averaged.py",
            "tests/losses/test_losses.py",
            [
                Bug(
                    "the log of M is left out",
                    "(torch.logsumexp(-losses, 0) - math.log(len(losses))).neg()",
                    "(torch.logsumexp(-losses, 0)).neg()",
                ),
                Bug("scores are added, not averaged", "t.mean(0, keepdim=True)", "t.sum(0, keepdim=True)"),
            ],
        ),
        File(
            "mheads/losses/distillation.py",
            'tests/api/test_distil.py -k "numpy or differences or finite"',
            [
                Bug(
                    "the temperature makes up for one division",
                    "weight * temperature**2 * apart",
                    "weight * temperature * apart",
                ),
            ],
        ),
        File(
            "mheads/losses/scored.py",
            'tests/losses/test_scored.py tests/losses/test_normalize.py -k "numpy or weighted_by or mixture"',
            [
                Bug(
                    "scores learn from examples of sample weight 0",
                    "score_weight * weights * learned",
                    "score_weight * learned",
                ),
            ],
        ),
        File(
            "mheads/losses/independent.py",
            "tests/losses/test_losses.py",
            [
                Bug(
                    "the sample weights are ignored",
                    "total = losses.sum() if sample_weights is None else (weights * losses).sum()",
                    "total = losses.sum()",
                ),
            ],
        ),
    ],
    "engine": [
        File(
            "mheads/common/number_ranges.py",
            "tests/engine/test_engine.py -k cuts_cover",
            [
                Bug(
                    "the larger cuts come last",
                    "stops = [(i + 1) * size + min(i + 1, extra) for i in range(parts)]",
                    "stops = [(i + 1) * size + max(0, i + 1 - parts + extra) for i in range(parts)]",
                ),
            ],
        ),
        File(
            "mheads/engine/forward_pass.py",
            "tests/engine/test_engine.py -k no_bit_depends",
            [
                Bug(
                    "outputs of an evaluation are stacked as they come",
                    "parts, self._outputs = sorted(self._outputs, key=lambda part: part[0].members), []",
                    "parts, self._outputs = self._outputs, []",
                    tests="tests/engine/test_engine.py -k no_bit_depends",
                ),
            ],
        ),
        File(
            "mheads/engine/step_results.py",
            "tests/engine/test_engine.py -k 'autograd'",
            [
                Bug(
                    "the loss of a step is added as it comes",
                    "total = sum(float(self.totals[key]) for key in sorted(self.totals))",
                    "total = sum(map(float, self.totals.values()))",
                    tests="tests/engine/test_engine.py -k no_bit_depends",
                ),
                Bug(
                    "sums are divided by examples, not by rows",
                    "self._of_mean = losses.new_ones(()) / max(1, self.num_rows)",
                    "self._of_mean = losses.new_ones(()) / max(1, sum(map(len, batches.values())))",
                    tests='tests/data/test_side_inputs.py -k "autograd or cut"',
                ),
                Bug(
                    "targets of a separable loss get the sample weights of all members",
                    "None if batch.sample_weights is None else batch.sample_weights[which]",
                    "None if batch.sample_weights is None else batch.sample_weights[:1]",
                    tests="tests/engine/test_engine.py -k with_sample_weights",
                ),
            ],
        ),
        File(
            "mheads/engine/micro_batches.py",
            "tests/engine/test_engine.py",
            [
                Bug(
                    "micro-batches are as large as a power of two allows",
                    "round(math.log2(batch_size / 80))",
                    "int(math.log2(batch_size / 80))",
                    tests="tests/engine/test_engine.py -k row_counts",
                ),
                Bug(
                    "pieces of a short batch are empty",
                    "pieces = min(pieces, num_examples // micro_batches)",
                    "pass",
                    tests="tests/engine/test_engine.py -k fewer_pieces",
                ),
                Bug(
                    "a shared stage below another one runs what its whole parent ran",
                    "return i * self[child] // self[stage]",
                    "return i // self[stage]",
                    tests="tests/distributed/test_ranks_engine.py -k pieces",
                ),
            ],
        ),
        File(
            "mheads/engine/training_step.py",
            "tests/engine/test_engine.py -k 'autograd'",
            [
                Bug(
                    "the dropout key lacks the micro-batch",
                    'key = (self.options.seed, "dropout", self.step, i, node.name)',
                    'key = (self.options.seed, "dropout", self.step, node.name)',
                    tests="tests/engine/test_engine.py -k part_of_its_key",
                ),
                Bug(
                    "the dropout key lacks the stage",
                    'key = (self.options.seed, "dropout", self.step, i, node.name)',
                    'key = (self.options.seed, "dropout", self.step, i)',
                    tests="tests/engine/test_engine.py -k part_of_its_key",
                ),
                Bug(
                    "gradients of children are added in another order",
                    "split.add(self.tree.child_index[node.name], [",
                    "split.add(len(parent.children) - 1 - self.tree.child_index[node.name], [",
                    tests="tests/engine/test_engine.py -k added_in_the_pairwise_tree",
                ),
                Bug(
                    "pieces are joined as they come",
                    "parts = [outputs[j] for j in sorted(outputs)]",
                    "parts = list(outputs.values())",
                    tests="tests/engine/test_engine.py -k no_bit_depends",
                ),
                Bug(
                    "gradients go back to other pieces",
                    "for piece, *own in zip(pieces, *leaves, strict=True):",
                    "for piece, *own in zip(reversed(pieces), *leaves, strict=True):",
                    tests="tests/engine/test_engine.py -k pieces",
                ),
                Bug(
                    "outputs go to the loss as they come",
                    "parts = sorted(self._outputs.pop(i), key=lambda part: part[0].members)",
                    "parts = self._outputs.pop(i)",
                    tests="tests/engine/test_engine.py -k no_bit_depends",
                ),
                Bug(
                    "examples of a small weight teach nobody",
                    "learn = self.results.assignment[:, self.slices[i]] > 0 if",
                    "learn = self.results.assignment[:, self.slices[i]] >= 1 if",
                    tests="tests/engine/test_engine.py -k with_sample_weights",
                ),
                Bug(
                    "a stage that learned nothing keeps the gradient of the step before",
                    "kept.fill_(-0.0) if gradient is None else kept.copy_(gradient)",
                    "kept if gradient is None else kept.copy_(gradient)",
                    tests="tests/engine/test_engine.py -k no_gradient_reaches",
                ),
                Bug(
                    "rows are left out of a leaf with side inputs",
                    "by_row = not node.children and not facts.sided and",
                    "by_row = not node.children and",
                    tests="tests/engine/test_engine.py -k side_inputs_are",
                ),
            ],
        ),
        File(
            "mheads/engine/gradient_sums.py",
            "tests/engine/test_engine.py -k pairwise",
            [
                Bug(
                    "gradients are added in place",
                    "b if a is None else a if b is None else a + b",
                    "b if a is None else a if b is None else a.add_(b)",
                    tests="tests/engine/test_engine.py -k share_memory",
                ),
                Bug("the odd last one waits for nobody", "if sibling < size", "if sibling <= size"),
                Bug(
                    "a sum is cut in the middle",
                    "half = 1 << (stop - start - 1).bit_length() - 1",
                    "half = 1",
                    tests="tests/distributed/test_placement.py -k subtrees",
                ),
                Bug(
                    "a subtree may begin anywhere",
                    "while start % (2 * size) == 0 and",
                    "while",
                    tests="tests/distributed/test_placement.py -k subtrees",
                ),
            ],
        ),
        File(
            "mheads/engine/rows.py",
            "tests/engine/test_engine.py tests/engine/test_tape.py -k 'with_sample_weights or rows_pad or combine'",
            [
                Bug(
                    "filling rows keep their gradient",
                    "            t = self.pick(canonical(t))\n            t[self.count :] = 0",
                    "            t = self.pick(canonical(t))",
                ),
                Bug(
                    "rows that were left out hold whatever was there",
                    "canonical(t.new_empty((self.total, *t.shape[1:]))).zero_()",
                    "canonical(t.new_empty((self.total, *t.shape[1:])))",
                ),
                Bug(
                    "one row has statistics",
                    "if 2 <= count < total else None",
                    "if 1 <= count < total else None",
                    tests="tests/engine/test_engine.py -k fewer_than_two",
                ),
            ],
        ),
        File(
            "mheads/engine/tape.py",
            "tests/engine/test_tape.py",
            [
                Bug(
                    "masks of some of some rows are those of the first ones",
                    "rows=index if self.rows is None else self.rows[index]",
                    "rows=index",
                    tests="tests/engine/test_tape.py -k combine",
                ),
                Bug(
                    "batch statistics are computed twice",
                    "if share < RECOMPUTE_BELOW and not stage.mixing",
                    "if share < RECOMPUTE_BELOW",
                    tests="tests/engine/test_tape.py -k kind_of_tape",
                ),
                Bug(
                    "a tape keeps its input",
                    "        x = self.input\n        del self.input\n",
                    "        x = self.input\n",
                    tests="tests/engine/test_engine.py -k frees",
                ),
                Bug(
                    "gradients come in the order of the layers",
                    "by_parameter.get(id(parameter)) for parameter in self.stage.parameters",
                    "gradient for parameter, gradient in reversed(learned)",
                    tests="tests/engine/test_tape.py -k go_to_their",
                ),
            ],
        ),
        File(
            "mheads/engine/stages.py",
            'tests/trees/test_freezing.py tests/engine/test_engine.py -k "autograd or threads"',
            [
                Bug(
                    "no gradient goes through a frozen stage to one that learns",
                    "node.parent is not None and (self.wanted[node.parent] or learns[node.parent])",
                    "node.parent is not None and learns[node.parent]",
                    tests="tests/engine/test_engine.py -k through_a_frozen",
                ),
                Bug(
                    "a stage takes all cores from those beside it",
                    "cores // max(beside[depth], min(depth, 1) + 1)",
                    "cores // (min(depth, 1) + 1)",
                    tests="tests/engine/test_engine.py -k threads_and_cuts",
                ),
            ],
        ),
        File(
            "mheads/engine/threads.py",
            "tests/engine/test_engine.py -k 'evaluation or error'",
            [
                Bug(
                    "cores are shared with nobody",
                    "sum(1 / sum(cpu in cpus for cpus in all_here) for cpu in own)",
                    "sum(1 for cpu in own)",
                    tests="tests/distributed/test_process_group.py -k share_of_the_cores",
                ),
                Bug(
                    "an update returns before it is done",
                    "            self.workers.spawn((i,), update_stage, name, gradients)\n        self.workers.wait()",
                    "            self.workers.spawn((i,), update_stage, name, gradients)",
                    tests="tests/engine/test_engine.py -k 'equal_plain and nested'",
                ),
                Bug(
                    "an evaluation that was left goes on",
                    "self.workers.wait()  # the caller may have stopped asking before the end",
                    "pass",
                    tests="tests/engine/test_engine.py -k is_left",
                ),
                Bug(
                    "workers compute on all threads",
                    "        torch.get_num_threads()\n        torch.set_num_threads(1)\n        self._started.wait()",
                    "        self._started.wait()",
                    tests="tests/engine/test_engine.py -k intra_op",
                ),
                Bug(
                    "evaluation drops",
                    "        self.net.eval()\n",
                    "",
                    tests="tests/engine/test_engine.py -k evaluation_does_not",
                ),
                Bug(
                    "training after an evaluation stays in eval mode",
                    "        self.net.train()\n",
                    "",
                    tests="tests/engine/test_engine.py -k steps_after",
                ),
                Bug(
                    "what was queued after an error runs",
                    "self._drop_queue()  # queued tasks may depend on the one that failed",
                    "pass",
                    tests="tests/engine/test_engine.py -k was_queued",
                ),
                Bug(
                    "accumulated batches are not cut apart",
                    "self.options.micro_batches * self.options.accumulate",
                    "self.options.micro_batches",
                    tests="tests/engine/test_engine.py -k accumulate",
                ),
            ],
        ),
        File(
            "mheads/engine/row_backward.py",
            "tests/engine/test_tape.py",
            [
                Bug(
                    "ReLU overwrites what others need",
                    "y = x.relu_() if owned else x.relu()",
                    "y = x.relu_()",
                    tests="tests/engine/test_tape.py -k in_place",
                ),
                Bug(
                    "what follows a flatten overwrites its input",
                    "GIVES_AWAY = (nn.Conv2d,",
                    "GIVES_AWAY = (nn.Flatten, nn.Conv2d,",
                    tests="tests/engine/test_tape.py -k in_place",
                ),
                Bug(
                    "the adjoint of an even normalisation is that of the forward",
                    "(layer.size - 1) // 2, layer.size // 2))",
                    "layer.size // 2, (layer.size - 1) // 2))",
                ),
                Bug(
                    "pooling overwrites its input",
                    "best = windows[0].clone()",
                    "best = windows[0]",
                    tests="tests/engine/test_tape.py -k two_passes",
                ),
                Bug(
                    "the first layer is asked for its input gradient",
                    "d_x, of_layer = step(d_x, pick, bool(backwards) or input_gradient)",
                    "d_x, of_layer = step(d_x, pick, True)",
                    tests="tests/engine/test_tape.py -k 'known_layers_all'",
                ),
            ],
        ),
        File(
            "mheads/networks/member_scaling.py",
            "tests/networks/test_member_scaling.py",
            [
                Bug("every member takes the first copy", "fill_(member % self.copies)", "fill_(0)"),
                Bug("all copies are scaled alike", "* self.weight", "* self.weight[:1].expand_as(self.weight)"),
            ],
        ),
        File(
            "mheads/engine/stacked_layers.py",
            "tests/networks/test_member_scaling.py -k plain_loop",
            [Bug("stacked members take copies by their place", 'weights["index"][:, 0]]', "torch.arange(len(x)) * 0]")],
        ),
        File(
            "mheads/engine/stacked_layers.py",
            "tests/engine/test_stacked_batch_norm.py -k 'each_layer or bfloat16 or what_is'",
            [
                Bug("stacked statistics mix members", "x.transpose(0, 1).flatten(1, 2)", "x.reshape(x.shape[1], -1)"),
                Bug("a stack's running variance is biased", "variance * (count / (count - 1))", "variance"),
                Bug("all of a stack count batches alike", ".add_(1).unsqueeze(1)", ".add_(1)[:1].unsqueeze(1)"),
                Bug("statistics of bfloat16 are rounded", "x.float() if x.dtype == torch.bfloat16 else x", "x"),
            ],
        ),
        File(
            "mheads/engine/training_step.py",
            "tests/engine/test_stacked_stages.py -k side_by_side",
            [Bug("stacked statistics take in rows of weight 0", "return None if rows.all() else", "return None and")],
        ),
        File(
            "mheads/engine/step_results.py",
            "tests/engine/test_stacked_stages.py -k one_member_at_a_time",
            [Bug("a loss of one's own gets a whole stack", "len(members) > 1 and self.loss.has_own_function", "False")],
        ),
        File(
            "mheads/engine/stacked_stages.py",
            "tests/engine/test_stacked_stages.py",
            [
                Bug(
                    "all leaves are siblings",
                    "if families and families[-1][-1].parent == leaf.parent:",
                    "if families:",
                    tests="tests/engine/test_stacked_stages.py -k follow",
                ),
                Bug(
                    "siblings are stacked whatever is frozen by hand",
                    "if find_unlike(net, leaves) is None]",
                    "]",
                    tests="tests/trees/test_freezing.py -k by_hand",
                ),
                Bug(
                    "filters that are stacked stay in float32 where their inputs do not",
                    ", nn.modules.conv._ConvNd, nn.PReLU)",
                    ")",
                    tests="tests/engine/test_precision.py -k filters",
                ),
            ],
        ),
        File(
            "mheads/engine/training_step.py",
            "tests/engine/test_large_outputs.py -k autograd",
            [
                Bug(
                    "losses go on without the way back",
                    "torch.autograd.grad(losses, leaves, d_losses,",
                    "torch.autograd.grad(losses.sum(), leaves, None,",
                ),
            ],
        ),
        File(
            "mheads/engine/large_outputs.py",
            "tests/engine/test_large_outputs.py",
            [Bug("scores are lost with large outputs", " and not loss.score_weight", "")],
        ),
        File(
            "mheads/trees/member_scores.py",
            "tests/losses/test_with_scores.py -k beside_the_layer",
            [Bug("the score stands where layers end", "layer or _find_answer_layer(network)", "layer")],
        ),
        File(
            "mheads/runs/run_files.py",
            "tests/engine/test_stacked_batch_norm.py -k from_before",
            [Bug("old runs resume with stacked BatchNorm", '"stack_batch_norm": "never", ', "")],
        ),
        File(
            "mheads/trees/splitting/cut_sequential.py",
            "tests/networks/test_member_scaling.py",
            [Bug("the trunk takes a copy for all", "any(isinstance(m, OwnCopy) for m in module.modules())", "False")],
        ),
        File(
            "mheads/networks/dropout.py",
            "tests/engine/test_engine.py -k 'dropout or mask'",
            [
                Bug("masks are not scaled", ".mul_(1 / (1 - p))", ""),
                Bug(
                    "all layers have the first mask",
                    "return _draw(masks, seeds.generator(*masks.key, number), shape, p, like)",
                    "return _draw(masks, seeds.generator(*masks.key, 0), shape, p, like)",
                ),
            ],
        ),
    ],
    "data": [
        File(
            "mheads/data/resampling.py",
            "tests/data/test_resampling.py",
            [
                Bug(
                    "every epoch has the same order",
                    'seeds.numpy_generator(seed, "order", epoch)',
                    'seeds.numpy_generator(seed, "order")',
                ),
                Bug(
                    "every seed has the same order",
                    'seeds.numpy_generator(seed, "order", epoch)',
                    'seeds.numpy_generator("order", epoch)',
                ),
                Bug(
                    "members draw the same bags",
                    'seeds.numpy_generator(seed, "bagging", m)',
                    'seeds.numpy_generator(seed, "bagging")',
                ),
                Bug("subsets have no mean of 1", "= n / count", "= 1"),
                Bug(
                    "a tiny fraction is no example",
                    "count = max(1, round(fraction * n))",
                    "count = round(fraction * n)",
                ),
                Bug("a subset of all is refused", "Field(gt=0, le=1,", "Field(gt=0, lt=1,"),
                Bug("specialists have no mean of 1", "owned[m, mine] = len(labels) / mine.sum()", "owned[m, mine] = 1"),
                Bug(
                    "weights are scaled over the members",
                    "totals = both.mean(axis=1, keepdims=True, dtype=np.float64)",
                    "totals = both.mean(axis=0, keepdims=True, dtype=np.float64)",
                ),
                Bug("one member may learn from nothing", "if not totals.all()", "if not totals.any()"),
            ],
        ),
        File(
            "mheads/data/preprocessing.py",
            "tests/data/test_preprocessing.py",
            [
                Bug(
                    "the mean of a constant is its rounded sum",
                    "np.where(low == high, low, _per_channel(total / len(rows)))",
                    "_per_channel(total / len(rows))",
                ),
                Bug(
                    "a channel is constant if each of its pixels is",
                    "_per_channel(low, np.min), _per_channel(high, np.max)",
                    "_per_channel(low), _per_channel(high)",
                ),
            ],
        ),
        File(
            "mheads/data/batches.py",
            "tests/data/test_batches.py",
            [
                Bug(
                    "ties are broken alike in every step",
                    'generator=seeds.generator(self.seed, "ties", step)',
                    'generator=seeds.generator(self.seed, "ties")',
                ),
                Bug(
                    "an example is augmented alike in every step",
                    'seeds.numpy_generator(self.seed, "augment", step)',
                    'seeds.numpy_generator(self.seed, "augment")',
                ),
                Bug(
                    "the batch that was read ahead is given for any step",
                    "if ready is not None and ready[0] == step else",
                    "if ready is not None else",
                ),
                Bug(
                    "the last short batch is not evaluated",
                    "starts = range(0, len(split), rows)",
                    "starts = range(0, len(split) - rows + 1, rows)",
                ),
                Bug("ties are cut by examples", "self.ties[:, rows],", "self.ties[:, start:stop],"),
                Bug("the sample weights are not cut", "self.sample_weights[:, rows],", "self.sample_weights,"),
                Bug(
                    "sample weights of examples are taken for those of rows",
                    "if sample_weights is not None and target_rows.counts is not None",
                    "if False",
                ),
                Bug(
                    "inputs that begin in the middle are cut from the start",
                    "slice(start - self.first_input, stop - self.first_input)",
                    "slice(start, stop)",
                ),
            ],
        ),
        File(
            "mheads/data/augmentation.py",
            "tests/data/test_arrays.py",
            [
                Bug(
                    "the last place of a crop is never taken",
                    "(chance * (most + 1)).astype(int)",
                    "(chance * most).astype(int)",
                ),
                Bug(
                    "alternating mirrors do not alternate",
                    "(first + epochs) % 2",
                    "first % 2",
                    tests="tests/data/test_batches.py -k alternating",
                ),
            ],
        ),
        File(
            "mheads/data/views.py",
            "tests/api/test_views.py",
            [
                Bug("a view moves up instead of down", "far - self.down", "far + self.down"),
                Bug("all views count alike", "part * (view.weight / total)", "part * (1 / len(views))"),
            ],
        ),
        File(
            "mheads/networks/whitening.py",
            "tests/training/test_cifar10_fast.py",
            [
                Bug("weights from a run are measured anew", ' and not bool(layer.get_parameter("weight").any())', ""),
                Bug("half of the filters are lost", "torch.cat([filters, -filters])", "torch.cat([filters, filters])"),
            ],
        ),
    ],
    "folders": [
        File(
            "mheads/runs/checkpoint.py",
            "tests/runs/test_checkpoint.py",
            [
                Bug(
                    "a checkpoint is never written again",
                    "if step == self.saved and not again",
                    "if step == self.saved",
                ),
                Bug(
                    "the tensors are copied when they are written",
                    "self._pending = self._writer.submit(self._write, step, content, state, self._count)",
                    "self._pending = self._writer.submit(lambda: self._write(step, to_bytes(tensors), state, self._count))",
                ),
                Bug(
                    "a save that failed is forgotten",
                    "        self.wait()\n        if step == self.saved",
                    "        if step == self.saved",
                ),
                Bug("the oldest is the newest", "if name.isdecimal()), reverse=True)", "if name.isdecimal()))"),
                Bug(
                    "the last step that is wanted is not",
                    "if limit is None or step <= limit",
                    "if limit is None or step < limit",
                ),
                Bug("the checkpoint in use is dropped", "if other > step", "if other >= step"),
                Bug(
                    "the checksum is that of the tensors alone",
                    'f"{tensors} {json.dumps(state, sort_keys=True)}"',
                    'f"{tensors}"',
                ),
                Bug("a renamed checkpoint is taken", 'if state["step"] != step', "if False"),
                Bug("a checkpoint of another run is taken", "if self.run is not None and", "if False and"),
                Bug("one checkpoint too many is kept", "self.stay][self.keep :]", "self.stay][self.keep + 1 :]"),
                Bug(
                    "tied weights cannot be saved",
                    "            tensor = tensor.clone()  # tied",
                    "            pass  # tied",
                ),
            ],
        ),
        File(
            "mheads/runs/manifest.py",
            "tests/runs/test_checkpoint.py",
            [
                Bug("the digest of the old file is dropped", "[*old, hashlib", "[hashlib"),
                Bug(
                    "digests of all files that ever were are known",
                    "old = [digest for digest in known if digest == now]",
                    "old = list(known)",
                ),
                Bug("the manifest itself is not checked", "if sha256 != _sha256(digests)", "if False"),
                Bug("what another process has replaced since is damage", 'self.__dict__.pop("digests", None)', "pass"),
                Bug(
                    "a file that changes in place stays listed",
                    "if path.name in self.digests:\n            self._write(",
                    "if False:\n            self._write(",
                ),
            ],
        ),
        File(
            "mheads/common/atomic_files.py",
            "tests/runs/test_checkpoint.py",
            [
                Bug(
                    "files are written in place",
                    "    with replacing(path) as hidden:\n        write_new(hidden, content)",
                    "    remove(path)\n    write_new(path, content)",
                ),
                Bug(
                    "a link in the place of a new file is followed",
                    "os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW",
                    "os.O_WRONLY | os.O_CREAT",
                ),
            ],
        ),
        File(
            "mheads/runs/run_files.py",
            "tests/runs/test_checkpoint.py",
            [
                Bug(
                    "the file is there before the manifest knows it",
                    "        self.manifest.expect(path, content)\n        atomic_files.write_atomically(path, content)",
                    "        atomic_files.write_atomically(path, content)\n        self.manifest.expect(path, content)",
                ),
            ],
        ),
        File(
            "mheads/runs/lock.py",
            "tests/runs/test_checkpoint.py",
            [
                Bug(
                    "two processes train in one folder",
                    "fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)",
                    "fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)",
                ),
            ],
        ),
        File(
            "mheads/runs/check_resume.py",
            "tests/runs/test_checkpoint.py",
            [
                Bug("a run goes on with other data", 'if identity["data"] != data.fingerprint', "if False"),
                Bug(
                    "a run cannot end at its checkpoint",
                    "steps[0] <= total or total in steps",
                    "steps[0] < total",
                    tests='tests/runs/test_folder.py -k "fewer_iterations"',
                ),
            ],
        ),
        File(
            "mheads/runs/folder.py",
            "tests/runs/test_checkpoint.py",
            [
                Bug(
                    "a run that gets more iterations is finished",
                    'return sound and self.read_result()["iterations"] == total',
                    "return sound",
                    tests='tests/training/test_resume.py -k "more_iterations or extended"',
                ),
                Bug(
                    "a run that somebody else began is discarded",
                    "if not self._begun or not self.lock.held",
                    "if not self.lock.held",
                ),
                Bug(
                    "the result of fewer iterations is taken for the newest weights",
                    'if not missing and not (steps and steps[0] > self.read_result()["iterations"])',
                    "if not missing",
                ),
            ],
        ),
        File(
            "mheads/runs/data_facts.py",
            "tests/runs/test_checkpoint.py",
            [
                Bug(
                    "colours are in the order of training by luck",
                    'facts["scale"], facts.get("bgr", False))',
                    'facts["scale"])',
                ),
            ],
        ),
        File(
            "mheads/training/train_state.py",
            "tests/training/test_resume.py -k schedule_goes",
            [
                Bug("the rate of a checkpoint is forgotten", '"rate": self.optimizer.rate', '"rate": 0.0'),
                Bug(
                    "the plateau starts anew where a run goes on", 'self.schedule.load_state(state["schedule"])', "pass"
                ),
                Bug(
                    "what was owned since the last evaluation is forgotten",
                    'self.owned = arrays["owned"].copy()',
                    "pass",
                    tests="tests/training/test_resume.py -k 'signal_saves and SIGTERM or cut_back'",
                ),
            ],
        ),
        File(
            "mheads/training/train_state.py",
            "tests/training/test_resume.py",
            [
                Bug(
                    "momentum is kept after pretraining",
                    "            self.optimizer.forget()",
                    "            pass",
                    tests="tests/training/test_resume.py -k starts_without",
                ),
                Bug(
                    "pretraining counts as iterations",
                    "self.schedule.rate(self.step - self.pretrain)",
                    "self.schedule.rate(self.step)",
                    tests="tests/training/test_resume.py -k pretraining_is",
                ),
            ],
        ),
        File(
            "mheads/training/log_and_checkpoint.py",
            "tests/training/test_resume.py -k 'all_checkpoints_are_damaged'",
            [
                Bug(
                    "newer checkpoints stay where a run goes on from an older one",
                    "checkpoints.drop_after(state.step)",
                    "pass",
                ),
            ],
        ),
    ],
    "optimizers": [
        File(
            "mheads/optim/stage_updates.py",
            "tests/optim/test_optimizers.py",
            [
                Bug(
                    "load_state drops the rate",
                    "                    )\n        self.rate = rate",
                    "                    )",
                ),
                Bug(
                    "Caffe's momentum is scaled the wrong way",
                    "ratio = min(self.rate / rate, HUGE)",
                    "ratio = min(rate / self.rate, HUGE)",
                ),
                Bug("multipliers of the rate are ignored", 'group["lr"] = now * group["lr_mult"]', 'group["lr"] = now'),
                Bug(
                    "groups that end early do not end",
                    'rate if rate_until is None or group["until"] == 1 else rate_until(group["until"])',
                    "rate",
                    tests="tests/optim/test_muon.py",
                ),
                Bug("shared gradients are no means", "1 / len(self.tree.nodes[stage].members) if", "1.0 if"),
                Bug(
                    "gradients are not clipped",
                    "gradient if scale == 1.0 else gradient * scale",
                    "gradient",
                    tests="tests/caffe/test_train.py -k clipped",
                ),
                Bug(
                    "decay by sign is decay",
                    'group["l1"] * parameter.sign()',
                    'group["l1"] * parameter',
                    tests="tests/caffe/test_train.py -k every_solver",
                ),
                Bug(
                    "what is loaded is what was saved, not a copy",
                    "else tensor.to(parameter.device, copy=True)",
                    "else tensor",
                ),
            ],
        ),
        File(
            "mheads/optim/parameter_groups.py",
            "tests/optim/test_optimizers.py tests/optim/test_muon.py",
            [
                Bug(
                    "multipliers of the decay are ignored",
                    "decay *= options.weight_decay",
                    "decay = options.weight_decay",
                ),
                Bug(
                    "a weight that two layers share is stepped twice",
                    "if not own.requires_grad or id(own) in seen",
                    "if not own.requires_grad",
                ),
                Bug("a group's learning rate is a multiplier", "asked.lr / options.lr", "asked.lr"),
                Bug("matrices of stacked stages are filters", "own.dim() > 2, ", "parameter.dim() > 2, "),
            ],
        ),
        File(
            "mheads/optim/muon.py",
            "tests/optim/test_muon.py",
            [
                Bug("filters decay", 'if group["weight_decay"] and not filters', 'if group["weight_decay"]'),
                Bug("filters are not rescaled", "filters.mul_(", "filters.mul("),
                Bug("tall matrices come back turned", "return x.mT if tall else x", "return x"),
                Bug(
                    "the momentum of filters is SGD's",
                    'self.momentum if group["filters"]',
                    'self.sgd_momentum if group["filters"]',
                ),
            ],
        ),
        File(
            "mheads/optim/schedules.py",
            "tests/optim/test_optimizers.py",
            [
                Bug(
                    "warmup begins at 0",
                    "rate *= (iteration + 1) / self.warmup",
                    "rate *= iteration / self.warmup",
                ),
                Bug(
                    "steps come one iteration late",
                    "sum(i >= one for one in at)",
                    "sum(i > one for one in at)",
                ),
                Bug(
                    "a window after a drop is compared with the one before it",
                    "self.previous = None  # a new window at the new learning rate",
                    "self.previous = mean  # a new window at the new learning rate",
                ),
                Bug(
                    "a plateau of worse losses is none",
                    "mean > (1 - self.threshold) * self.previous",
                    "abs(mean - self.previous) < self.threshold * self.previous",
                ),
            ],
        ),
        File(
            "mheads/optim/caffe_optimizers.py",
            "tests/caffe/test_train.py -k every_solver",
            [
                Bug(
                    "Adam does not correct its mean",
                    "correction = math.sqrt(1 - b2 ** t.item()) / (1 - b1 ** t.item())",
                    "correction = math.sqrt(1 - b2 ** t.item())",
                ),
                Bug(
                    "AdaGrad forgets",
                    'state["squares"] = state.get("squares", torch.zeros_like(g)) + g.square()',
                    'state["squares"] = g.square()',
                ),
                Bug(
                    "AdaDelta scales by this update",
                    "(before + delta) / (h + delta)",
                    "(before + delta) / (before + h + delta)",
                ),
                Bug(
                    "decay does not go through the gradient",
                    'gradient = gradient + group["weight_decay"] * parameter',
                    "gradient = gradient",
                ),
            ],
        ),
        File(
            "mheads/engine/diagnostics.py",
            "tests/engine/test_diagnostics.py",
            [
                Bug(
                    "small gradients are scaled up to the limit",
                    "(most / norm if norm > most else 1.0), None",
                    "(most / norm), None",
                ),
                Bug(
                    "norms of stages are added instead of their squares",
                    "(share(name) * norms[name].item()) ** 2 for name in",
                    "(share(name) * norms[name].item()) for name in",
                ),
            ],
        ),
    ],
    "metrics": [
        File(
            "mheads/problems/metrics.py",
            "tests/problems/test_metrics.py",
            [
                Bug(
                    "bins are closed below",
                    "((confidence.nan_to_num(0) * BINS).ceil().long() - 1).clamp(0, BINS - 1)",
                    "(confidence.nan_to_num(0) * BINS).floor().long().clamp(0, BINS - 1)",
                ),
                Bug(
                    "of equal scores the last one answers",
                    "((scores == true) & not_before)",
                    "((scores == true) & ~not_before)",
                ),
                Bug(
                    "an infinite loss owns as little as NaN",
                    "losses.nan_to_num(nan=math.inf).argmin(0)",
                    "losses.nan_to_num(nan=math.inf, posinf=math.inf).argmin(0)",
                ),
                Bug(
                    "the likelihood of the mean is that of the sum",
                    "torch.logsumexp(logs, 0) - math.log(len(logs))",
                    "torch.logsumexp(logs, 0)",
                ),
                Bug(
                    "members are paired with themselves",
                    "num_pairs = max(self.members * (self.members - 1), 1)",
                    "num_pairs = self.members * self.members",
                ),
                Bug("the Oracle wants all members to be right", "right.any(0).sum()", "right.all(0).sum()"),
                Bug(
                    "top M has more than there are classes",
                    "min(max(self.members, LEAST_K), self.classes)",
                    "max(self.members, LEAST_K)",
                ),
                Bug(
                    "NaN owns what all answer with NaN",
                    "return owner, ~losses.isnan().all(0)",
                    "return owner, ~losses.isnan().any(0)",
                ),
                Bug(
                    "the owner is right where nobody owns",
                    "(right.gather(0, owner[None])[0] & owned)",
                    "(right.gather(0, owner[None])[0] | ~owned)",
                ),
                Bug(
                    "the answer of members trained on scores is that of probabilities",
                    "together, their_losses = [score.softmax(-1)]",
                    "together, their_losses = [mean_members(probabilities)]",
                    tests="tests/problems/test_other_targets.py -k mean_of_their_scores",
                ),
                Bug(
                    "weights of the scored answer are those of the first member",
                    "values * weights.to(values.dtype)",
                    "values * weights[:1].to(values.dtype)",
                    tests='tests/losses/test_scored.py -k "scored_answer or weights"',
                ),
            ],
        ),
        File(
            "mheads/trees/member_scores.py",
            'tests/losses/test_scored.py -k "weights or scored_answer"',
            [
                Bug(
                    "scores are compared without their sigmoids",
                    "F.logsigmoid(score.double()).softmax(0)",
                    "score.double().softmax(0)",
                ),
            ],
        ),
        File(
            "mheads/problems/regression.py",
            'tests/problems/test_other_targets.py tests/problems/test_regression.py -k "numpy or scikit or cut_of or meaning"',
            [
                Bug(
                    "variances are counted from the first example of each batch",
                    "self._first = self._first or (y[0], pair[:, :1])",
                    "self._first = (y[0], pair[:, :1])",
                ),
                Bug(
                    "who answers with NaN comes closest",
                    "best, nearest = (_nan_to_inf(errors[:m]).amin(0)",
                    "best, nearest = (errors[:m].amin(0)",
                    tests="tests/problems/test_other_targets.py -k never_comes_closest",
                ),
                Bug(
                    "the Oracle may be the mean of the members",
                    "_nan_to_inf(errors[:m]).amin(0)",
                    "_nan_to_inf(errors).amin(0)",
                ),
                Bug(
                    "points of a density do not know its spread",
                    "(outputs + scale * points_of_normal(k) - y)",
                    "(outputs + points_of_normal(k) - y)",
                    tests="tests/problems/test_hypotheses.py -k points",
                ),
                Bug(
                    "the spread is not a root",
                    "spread=math.sqrt(self._spread / self.examples)",
                    "spread=self._spread / self.examples",
                ),
            ],
        ),
        File(
            "mheads/problems/multilabel.py",
            'tests/problems/test_other_targets.py -k "scikit or nobody or cut_of"',
            [
                Bug(
                    "equal scores are ranked by their place",
                    "last[:-1] = ranked[:-1] != ranked[1:]",
                    "last[:-1] = True",
                ),
                Bug(
                    "a class that nobody has counts",
                    "(precisions / positives)[positives > 0].mean()",
                    "(precisions / positives.clamp_min(1)).mean()",
                ),
            ],
        ),
        File(
            "mheads/problems/segmentation.py",
            'tests/problems/test_other_targets.py -k "scikit or pixel or cut_of"',
            [
                Bug(
                    "pixels that do not count do",
                    "cells[(y != IGNORED).expand_as(cells)]",
                    "cells.clamp_min(0).flatten()",
                ),
                Bug(
                    "a pixel with NaN is answered with a class",
                    "predictors.argmax(2).masked_fill(predictors.isnan().any(2), self.classes)",
                    "predictors.argmax(2)",
                ),
                Bug(
                    "the Oracle takes the worst member",
                    "mean_iou(tables[:m]).nan_to_num(nan=-1).argmax(0)",
                    "mean_iou(tables[:m]).nan_to_num(nan=-1).argmin(0)",
                ),
            ],
        ),
        File(
            "mheads/problems/average_precision.py",
            "tests/problems/test_average_precision.py",
            [
                Bug("an overlap of exactly half is wrong", "shared.max(1) < OVERLAP", "shared.max(1) <= OVERLAP"),
                Bug("an object may be found twice", "right[np.unique(hits, return_index=True)[1]] = 1", "right[:] = 1"),
                Bug(
                    "the precision at a recall is that above it",
                    "precision[recall >= point]",
                    "precision[recall > point]",
                ),
                Bug("difficult objects are wrong", "hits = hits[hits != IGNORED]", "hits = hits.copy()"),
            ],
        ),
        File(
            "mheads/problems/member_losses.py",
            'tests/problems/test_member_losses.py tests/losses/test_confident.py tests/problems/test_other_targets.py -k "numpy or pixels or scikit"',
            [
                Bug(
                    "the mean is over pixels that do not count, too",
                    "(labels != IGNORED).flatten(1).sum(1).clamp_min(1)",
                    "labels[0].numel()",
                ),
                Bug(
                    "background has a box",
                    "box_weight * far * (classes > 0)",
                    "box_weight * far",
                    tests='tests/api/test_detection.py -k "smooth_l1 or autograd"',
                ),
            ],
        ),
        File(
            "mheads/engine/measure.py",
            "tests/losses/test_scored.py -k 'every_file or predict_and'",
            [
                Bug(
                    "scores are not measured",
                    "yield problem.answer(outputs), member_scores.weights(outputs), targets",
                    "yield problem.answer(outputs), None, targets",
                ),
                Bug(
                    "models stay in eval mode",
                    "            m.training = mode",
                    "            m.training = m.training",
                    tests="tests/api/test_fit.py -k mode",
                ),
            ],
        ),
    ],
    "suites": [
        File(
            "mheads/common/signals.py",
            "tests/common/test_signals.py",
            [
                Bug("a signal at the end of a run is lost", "if received and _told:", "if not received and _told:"),
                Bug("a second signal goes to the run again", "if once:", "if not once:"),
            ],
        ),
        File(
            "mheads/report/compare.py",
            "tests/report/test_compare.py",
            [
                Bug(
                    "the Oracle stands beside the accuracy of one answer",
                    'top(record.result or {}, most), ".2f")',
                    'top(record.result or {}, 1), ".2f")',
                ),
                Bug(
                    "settings that are equal are shown as well",
                    "if any(_differ(key, value, other[key])",
                    "if any(not _differ(key, value, other[key])",
                ),
            ],
        ),
        File(
            "mheads/report/charts/hypotheses.py",
            'tests/report/test_plot.py -k "hypotheses or trajectories"',
            [
                Bug("targets are in another order than the answers", 'y[order].tolist(), "ink")', 'y.tolist(), "ink")'),
                Bug(
                    "probabilities of trajectories are those of another example",
                    "probabilities[:, n]",
                    "probabilities[:, 0]",
                ),
            ],
        ),
        File(
            "mheads/suites/findings.py",
            "tests/suites/test_best_of.py -k each_seed",
            [
                Bug(
                    "rows choose on the test set",
                    'run["validation"][by] if test else read_value(run["result"]',
                    'read_value(run["result"]',
                ),
                Bug("rows choose the worst", "higher_is_better(document, by) else -1", "True else -1"),
                Bug("a seed counts with some of its runs", 'if len(runs) == len(entry["best_of"])', "if runs"),
            ],
        ),
        File(
            "mheads/trees/freezing.py",
            "tests/trees/test_freezing.py -k prefix",
            [
                Bug(
                    "layers up to one freeze stages of their name",
                    'f"{LAYER}{layer}" if layer in both else layer',
                    "layer",
                )
            ],
        ),
        File(
            "mheads/problems/baselines.py",
            "tests/report/test_report.py -k at_chance",
            [Bug("as many members as classes have collapsed", ' or result["oracle_chance"] == 100', "")],
        ),
        File(
            "mheads/suites/verdicts.py",
            "tests/suites/test_verdicts.py -k splits",
            [
                Bug("splits that overlap count as independent", "test_share / (1 - test_share)", "0.0"),
                Bug("an interval has one side", "t.ppf(1 - LEVEL / 2,", "t.ppf(1 - LEVEL,"),
                Bug(
                    "small numbers are rounded away",
                    "- math.floor(math.log10(largest))",
                    "",
                    tests="tests/suites/test_verdicts.py -k unit",
                ),
                Bug(
                    "corrected p-values may fall",
                    "max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))",
                    "min(1.0, (len(p_values) - rank) * p_values[i])",
                    tests="tests/suites/test_verdicts.py -k correct",
                ),
            ],
        ),
        File(
            "mheads/suites/planner.py",
            "tests/suites/test_keys_of_rows.py",
            [
                Bug(
                    "a loss for all rows forgets their options",
                    "*suites, *choices, *rows,",
                    "*suites, *rows, *choices,",
                ),
                Bug("rows have keys that do nothing", "check_idle_options(config, row.set)", "pass"),
            ],
        ),
        File(
            "mheads/runs/check_resume.py",
            "tests/api/test_edges.py -k other_names",
            [Bug("runs resume with other classes", "if there != now:", "if False:")],
        ),
        File(
            "mheads/report/plot.py",
            "tests/report/test_plot.py -k losses_without_k",
            [
                Bug("unlike losses are trials of one k", 'name_loss(record, but="k")', "record.config.loss.name"),
                Bug("ensembles of two sizes are one", 'f"of {record.config.members} members"', '""'),
            ],
        ),
        File(
            "mheads/suites/share_pretraining.py",
            "tests/suites/test_share_pretraining.py -k alone",
            [
                Bug("pretraining is shared by other configs", "if keys <= AFTERWARDS else 0", ""),
                Bug("the shortest pretraining is shared", "checkpoint, other = max(", "checkpoint, other = min("),
                Bug("shared pretraining loses its log", "folder.metrics, lines)", 'folder.metrics, b"")'),
            ],
        ),
        File(
            "mheads/training/log_and_checkpoint.py",
            "tests/suites/test_share_pretraining.py -k alone",
            [Bug("the end of pretraining is not kept", "self.checkpoints.stay = (state.pretrain,)", "pass")],
        ),
        File(
            "mheads/training/init_weights.py",
            "tests/problems/test_hypotheses.py -k compared_with",
            [
                Bug(
                    "target scales are not compared",
                    "(_describe_target_scale(old), _describe_target_scale(new))",
                    "('', '')",
                ),
                Bug(
                    "an earlier fit has learned from no data",
                    "source_run.read_data() if source_run.exists() else net.history.data",
                    "source_run.read_data() if source_run.exists() else None",
                ),
            ],
        ),
        File(
            "mheads/api/fit.py",
            "tests/problems/test_hypotheses.py -k second_fit",
            [
                Bug(
                    "a second fit is silent",
                    "if net.history.weights and net.frozen == net.history.frozen:",
                    "if False:",
                ),
            ],
        ),
        File(
            "mheads/report/compare.py",
            "tests/report/test_compare.py -k not_its_defaults",
            [
                Bug(
                    "options of a loss are left out", "for key, value in loss.summary.items()]", "for key, value in ()]"
                ),
            ],
        ),
        File(
            "mheads/api/evaluate.py",
            "tests/suites/test_best_of.py -k kernels",
            [
                Bug(
                    "kernels are chosen on the test set",
                    "held_out, data.inputs, problem",
                    "examples, data.inputs, problem",
                )
            ],
        ),
    ],
    "ranks": [
        File(
            "mheads/distributed/ranks_engine.py",
            "tests/distributed/test_ranks_engine.py -k 'MCL and of'",
            [
                Bug(
                    "a signal to another rank is not heard",
                    "stop = stop or int(asked)",
                    "stop = stop or int(own[0])",
                    tests='tests/distributed/test_faults.py -k "signal_to_one and 2-1"',
                ),
                Bug(
                    "losses of other ranks do not reach this one",
                    "whole[members.cpu(), start:end] = block.cpu()",
                    "pass",
                ),
                Bug(
                    "optimizer state is not handed out",
                    'if not name.startswith("progress/")}',
                    'if name.startswith("model/")}',
                    tests="tests/distributed/test_sharded_checkpoints.py -k do_not_see",
                ),
            ],
        ),
        File(
            "mheads/distributed/rank_training_step.py",
            "tests/distributed/test_ranks_engine.py -k 'probability and explicit'",
            [
                Bug(
                    "a rank gives the gradients of its own micro-batch to others",
                    "_as_form, self._form(node, i, self.me), own[i]",
                    "_as_form, self._form(node, min(own), self.me), own[min(own)]",
                ),
                Bug(
                    "sums of micro-batches are taken in the order in which they finish",
                    "zip(given, held[self.me], strict=True)",
                    "zip(given, reversed(held[self.me]), strict=True)",
                    tests="tests/distributed/test_ranks_engine.py -k uneven",
                ),
                Bug(
                    "a gradient that nobody learned is noise",
                    "piece.fill_(-0.0) if gradient is None",
                    "piece.fill_(1e-3) if gradient is None",
                    tests="tests/distributed/test_ranks_engine.py -k 'MCL and of'",
                    equivalent="every parameter of these networks learns in every micro-batch",
                ),
            ],
        ),
        File(
            "mheads/distributed/collectives.py",
            "tests/distributed/test_ranks_engine.py -k uneven",
            [
                Bug(
                    "a longer value than before is cut off",
                    "if longest <= room",
                    "if True",
                    tests="tests/distributed/test_collectives.py -k every_form",
                ),
                Bug(
                    "tensors arrive in other strides",
                    'torch.empty_like(t, device="meta").stride() == t.stride() else t.clone()',
                    "t.is_contiguous() else t.contiguous()",
                    tests="tests/distributed/test_collectives.py -k every_form",
                ),
                Bug(
                    "collectives run as their inputs come",
                    "key=lambda one: one.order",
                    "key=lambda one: one.inputs",
                    tests="tests/distributed/test_ranks_engine.py -k 'probability and explicit'",
                ),
            ],
        ),
        File(
            "mheads/distributed/planning/placement.py",
            "tests/distributed/test_placement.py",
            [
                Bug(
                    "children that are together are not added where they are",
                    "subtrees(len(owners), range(start, stop))",
                    "[range(k, k + 1) for k in range(start, stop)]",
                ),
                Bug(
                    "every rank reads the first inputs",
                    "needed += [parts[i] for i in self.runs(root.name, rank)]",
                    "needed += [parts[i] for i in self.runs(root.name, 0)]",
                    tests="tests/data/test_batches.py -k needs_the_inputs",
                ),
                Bug("a rank beyond the mesh owns stages", "if rank >= self.ranks", "if rank > self.ranks"),
                Bug(
                    "a stage that is not named goes to rank 0", "stages[name] = stages[node.parent]", "stages[name] = 0"
                ),
                Bug(
                    "a stage is only where its first member is",
                    "held[parent] |= held[name]",
                    "held[parent] or held[parent].update(held[name])",
                ),
            ],
        ),
        File(
            "mheads/distributed/layers/communication_layers.py",
            "tests/distributed/test_communication_layers.py -k 'in_place or order or random_programs or copy_of'",
            [
                Bug(
                    "the root's own value is not a copy",
                    "copies = tuple(value.clone() for value in values)",
                    "copies = tuple(values)",
                ),
                Bug(
                    "gradients are added in any order",
                    "for rank in layer.ranks if len(parts[rank])]",
                    "for rank in reversed(layer.ranks) if len(parts[rank])]",
                ),
                Bug(
                    "a copy of a layer answers for the original",
                    "self._enter()  # a copy is a further layer",
                    "pass  # a copy is a further layer",
                ),
            ],
        ),
        File(
            "mheads/distributed/lost_ranks.py",
            "tests/distributed/test_process_group.py -k 'silent or innocent or fault or all_is_done'",
            [
                Bug("who waits for others hangs", "if self._busy() and progress == before", "if progress == before"),
                Bug("who makes progress hangs", "if self._busy() and progress == before", "if self._busy()"),
                Bug(
                    "who beats and does nothing is lost",
                    "if beat != heard.get(rank, (None, 0))[0]",
                    "if rank not in heard or beat[1] != heard[rank][0][1]",
                ),
                Bug(
                    "who notices that a rank is gone blames itself",
                    "if self._lost_connection and suspected and now",
                    "if self._lost_connection and now",
                    tests="tests/distributed/test_process_group.py -k breaks_off_late",
                ),
                Bug(
                    "the end of a rank after the end is a failure",
                    "if self.failure is not None or self.over.is_set()",
                    "if self.failure is not None",
                ),
                Bug(
                    "the last fault counts, not the first",
                    "return (rank, reason) if kept is None else tuple(json.loads(kept))",
                    "return (rank, reason)",
                ),
            ],
        ),
        File(
            "mheads/distributed/process_group.py",
            "tests/distributed/test_process_group.py -k mistake_of",
            [
                Bug(
                    "the last rank is not compared",
                    "for rank in range(1, self.size)}",
                    "for rank in range(1, self.size - 1)}",
                ),
                Bug(
                    "a mistake of the main rank is found by nobody else",
                    "self.post(key, (None, str(error)))",
                    "self.post(key, (None, None))",
                ),
            ],
        ),
        File(
            "mheads/distributed/layers/graph_engine.py",
            'tests/distributed/test_caffe_on_ranks.py -k "another_graph_runs and root"',
            [
                Bug("dropout elsewhere is not counted", "skip_mask()  # masks are numbered as in one process", "pass"),
                Bug(
                    "the loss is that of the last rank",
                    "reports[0][0] / max(1, rows)",
                    "reports[self.world.size - 1][0] / max(1, rows)",
                ),
            ],
        ),
        File(
            "mheads/distributed/launcher.py",
            'tests/distributed/test_launcher.py -k "not torchrun_hands and not old_name"',
            [
                Bug(
                    "a batch script is a step of srun",
                    'if not 0 <= _integer(given, "SLURM_STEP_ID", -1) < RESERVED_STEPS',
                    'if not 0 <= _integer(given, "SLURM_STEP_ID", -1) <= RESERVED_STEPS + 15',
                ),
                Bug(
                    "ranks of one host meet at a default port",
                    'address, port = "127.0.0.1", of_job',
                    'address = "127.0.0.1"',
                ),
            ],
        ),
    ],
}
