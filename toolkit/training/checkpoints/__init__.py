"""What a run resumes from: what a checkpoint holds, how it is written, and how it is restored.

store         a directory of checkpoints: arrays and a manifest with their SHA-256
background    a checkpoint is written while training goes on
position      where training stands
state         a model's variables as arrays, and back
host_state    the counters of a user's callbacks, and random generators
data_position  bringing a user's data to where training stands
broadcast     the chief's checkpoint broadcast to all processes, and what they compare before training
"""
