"""Columns and bits of the sampling tables, which are indexed by request slot.

`sampling_floats` float32 [R, 8] and `sampling_ints` int32 [R, 8] hold a request's parameters;
`token_state` int32 [R, V] what it knows of each token. Whoever admits a request fills its rows;
`kernels.sampling` reads them and counts the output. The last of the R slots is the dummy's.
"""

import triton.language as tl

NUM_COLUMNS = 8

# Columns of sampling_floats. A temperature below LEAST_TEMPERATURE counts as 0, which is greedy:
# scaled logits would lose their differences. Off: top_p 1, min_p 0, penalties 1, 0 and 0.
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)
LEAST_TEMPERATURE = 2.0**-16

# Columns of sampling_ints. TOP_K: 0 is off. Tokens marked IS_STOP may not be produced at
# positions below FIRST_STOP_POSITION. NUM_LOGPROBS: -1 is not asked, 0 the chosen token only.
TOP_K, SAMPLE_INDEX, FIRST_STOP_POSITION, FLAGS, NUM_LOGPROBS = range(5)
# Bits of FLAGS: which of the large tables are in use; the other one is never read.
USES_TOKEN_STATE, USES_LOGIT_BIAS = 1, 2

# Bits of token_state; the bits above them count the token in the output.
IN_PROMPT, IS_STOP = 1, 2
COUNT_SHIFT = 2
COUNT_UNIT = 1 << COUNT_SHIFT

# The same as Triton kernels need them.
K_NUM_COLUMNS = tl.constexpr(NUM_COLUMNS)
K_TEMPERATURE, K_TOP_P, K_MIN_P = (
    tl.constexpr(TEMPERATURE),
    tl.constexpr(TOP_P),
    tl.constexpr(MIN_P),
)
K_REPETITION, K_PRESENCE = tl.constexpr(REPETITION), tl.constexpr(PRESENCE)
K_FREQUENCY, K_LEAST_TEMPERATURE = tl.constexpr(FREQUENCY), tl.constexpr(LEAST_TEMPERATURE)
K_TOP_K, K_SAMPLE_INDEX = tl.constexpr(TOP_K), tl.constexpr(SAMPLE_INDEX)
K_FIRST_STOP_POSITION, K_FLAGS = tl.constexpr(FIRST_STOP_POSITION), tl.constexpr(FLAGS)
K_USES_TOKEN_STATE = tl.constexpr(USES_TOKEN_STATE)
K_USES_LOGIT_BIAS = tl.constexpr(USES_LOGIT_BIAS)
K_IN_PROMPT, K_IS_STOP = tl.constexpr(IN_PROMPT), tl.constexpr(IS_STOP)
K_COUNT_SHIFT, K_COUNT_UNIT = tl.constexpr(COUNT_SHIFT), tl.constexpr(COUNT_UNIT)
