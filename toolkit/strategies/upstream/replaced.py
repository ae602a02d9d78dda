"""The functions of Keras and TensorFlow that are replaced for the process, and who answers a call of each, in order.

Each is replaced once, when the first of those is there: `fit/adapt.py` has the functions by which strategies answer,
and a trial, a view, a plan and XLA answer from their first use on. Beside each stands the attribute of `this_step`
that is set while it is their turn, or "" if they look by themselves whether they have something to do. Where it is
nobody's turn, the original is called.
"""

from toolkit.strategies.upstream.wrapping import Replaced

APPLY = Replaced(
    "Optimizer.apply",
    "LossScaleOptimizer.apply",
    trial="recorded",  # Notes the optimizer and its variables.
    servers="ps_step",  # Sends gradients to parameter servers.
    chief="",  # Parameter servers' chief acts as the only replica.
    replicas="",  # Sums gradients, also of an optimizer that is on no model.
)
BUILD = Replaced("Optimizer.build", replicas="")  # Keeps state as replicas need it.
GRADIENT = Replaced(
    "GradientTape.gradient",
    trial="recorded",  # Notes what is differentiated; gradients are zeros.
    replicas="",  # Exchanges gradients in the user's own step.
)
WATCHED = Replaced("GradientTape.watched_variables", servers="")  # Names variables of which a step has the values.
LAYER = Replaced(
    "Layer.__call__",
    plan="planned",  # Records which layers one call of a model enters.
    trial="recorded",  # Records which layers the step calls.
    view="view",  # Hands the layer this replica's rows.
    xla="xla",  # Compiles the layer, where the step's layers are pieces.
    weights="gathers",  # Weights that it reads are gathered when its input is there.
)
ADD_WEIGHT = Replaced("Layer.add_weight", replicas="")  # Makes weights that replicas keep in shards.
FUNCTION = Replaced(
    "Function.__call__",
    step="inlines",  # A tf.function becomes a part of the step.
    check="loops",  # Its first call is compared with one device's, if it runs a step on replicas.
)
REDUCE = Replaced("reduce_weighted_values", replicas="")  # A mean is one over the whole batch.
NUMBERS = Replaced(
    "stateless_random_uniform_v2",
    "stateless_random_uniform_full_int_v2",
    replicas="draws",  # Skip to their rows.
    xla="compiled_alone",  # Draws as on one device, where XLA compiles the step.
)
NORMAL = Replaced("stateless_random_normal_v2", replicas="draws", xla="compiled_alone")
INTEGERS = Replaced("stateless_random_uniform_int_v2", replicas="draws", xla="compiled_alone")
TRUNCATED = Replaced("stateless_truncated_normal_v2", replicas="draws", xla="compiled_alone")
GAMMA = Replaced("stateless_random_gamma_v3", replicas="draws")
BY_SEED = Replaced("stateless_random_binomial", "stateless_random_poisson", replicas="draws")
BETWEEN = Replaced("stateless_parameterized_truncated_normal", replicas="draws")
CLASSES = Replaced("stateless_multinomial", replicas="draws")
SEED = Replaced("SeedGenerator.next", replicas="")  # Replicas draw for themselves, where their rows aren't known.
OPERATION_SEED = Replaced(
    "get_seed",
    view="view",  # Between layers, replicas draw the same.
    replicas="replica",  # Else no two draw the same.
)
REMAT = Replaced("remat", toolkit="")  # Keeps only a layer's arguments for the backward pass.
TAKE = Replaced("take", servers="")  # Looks rows up on parameter servers, also in the user's own loop.

MODEL = Replaced("Trainer.__init__", strategies="")  # Gives a model methods of its own.
EPOCH_ITERATOR = Replaced(
    "TFEpochIterator.__init__",
    launcher="",  # Learns the size of a batch.
    strategies="",  # Learn what Keras reads.
)
SET_MODEL = Replaced(
    "CallbackList.set_model",
    served="",  # Refuses to train in a task that serves a chief.
    launcher="",  # Learns of steps and epochs.
    strategies="",  # Have callbacks write on the chief alone.
)
SAVE_CHECKPOINT = Replaced("TrackableSaver.save", workers="")  # Writes aside and renames.
LOAD_CONVERTED = Replaced("load_ast", launcher="")  # Notes which lines of a script AutoGraph's are.
DEVICE_DATASET = Replaced("_create_device_dataset", mirrored="")  # Turns tf.data's tuning off.
