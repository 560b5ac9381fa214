"""Number the words of a step's header, and name the sizes that kernels and programs share."""

from dataclasses import replace

from mie.base.arithmetic import ceil_div
from mie.ops.weights.integer import ACTIVATION_GROUP
from mie.ops.weights.quantised import UNIT_INPUTS, Form

# Number of words of the header. It describes a step to every kernel.
NUM_TOKENS, NUM_ROWS, NUM_PAIRS, NUM_SEQS, TABLE_WIDTH, NUM_ITEMS, NUM_MERGES = range(7)
TOKEN_IDS, POSITIONS, SLOTS, STARTS, LENGTHS, TABLES, LOGITS_ROWS = range(7, 14)
ITEMS, MERGES, PARTIALS = range(14, 17)
NUM_EXPERT_ITEMS = 17
"""The number of items of a layer's experts. A kernel writes it for the kernels that follow."""
STATE_SLOTS, FRESH = 18, 19
NUM_ADAPTED, ADAPTED = 20, 21
"""The number of tokens with an adapter, and the address of their pairs of token and slot."""
HEADER_WORDS = 22

LANES = 16
"""Numbers of a vector, and outputs of a panel."""
INPUTS_OF_WORD = 8
"""Number of inputs with 4-bit codes in a word of an output.

Signed codes are of neighbouring inputs, the first in the highest nibble. For unsigned codes see
`words_of_block`.
"""
BYTES_OF_WORD = 4
"""Number of inputs with 8-bit codes in a word of an output, the first in the highest byte.

Products with rounded rows read codes of 8 bits in words. Exact products read them input by input.
"""
INPUTS_OF_SEXTETS = 16
"""Number of inputs with 6-bit codes in three words of an output, for products with rounded rows.

The low six bits of the bytes of word w are the codes of inputs 4 w to 4 w + 3, the first in the
highest byte. The high two bits of the three words are the codes of the last four inputs, with their
lowest two bits in the first word. Signed codes have `SEXTET_BIAS` added.
"""
SEXTET_WORDS, SEXTET_BIAS = 3, 32
SIGNED_NIBBLE = 2.0**28
"""The weight of a signed code at the top of a word. Exact products divide the scale by it."""
PANELS = 4
"""Number of panels of a group, the widest tile of a product."""
ROW_TILE = 8
"""Rows of a tile of elementwise work."""
CHANNELS = 64
"""Channels of a tile of a convolution."""
BLOCK_ROWS = 96
"""Rows of a tile of a product."""
SUMS_BYTES = BLOCK_ROWS * PANELS * LANES * 4
"""The sums of a tile of a product."""
K_BLOCK = 512
"""Inputs of a pass over the rows of a tile. The weights of a group then fit into an L2 cache.

It is a multiple of every group of inputs that share a scale.
"""
WIDE_BYTES = K_BLOCK * PANELS * LANES * 4
"""The weights of a pass, widened to float32."""

SEGMENT_NUMBERS = 3
"""Words after the codes of a segment of a rounded row: scale, first sum, and sum of the codes."""
ROUNDED_GROUPS = 16
"""Groups of 32 inputs of a row that a tile rounds."""
REGION = 16
"""Blocks of a region of the cache. `mie.memory.pool` lets a table begin with a region."""
RUN = 4
"""Blocks of a head whose keys are adjacent. The values of these blocks follow."""

QUERY_ROWS = 48
"""Rows of attention that one tile scores: queries times the heads of a group."""
KEY_TILE = 64
"""Positions of one step of the online softmax."""
PART = 512
"""Positions of a part. Long contexts are attended part by part and merged in order."""
ITEM_WORDS = 8
PAIR_WORDS, EXPERT_ITEM_WORDS = 2, 3
"""Words of a pair of a token and an expert, and of an item of an expert's rows."""
SLOT_WORDS = 2
"""Words of a pair of a token and the slot of its adapter."""
ADAPTED_TILE, EXPAND_SHARES = 4, 4
"""Pairs of a tile of an adapter's products, and shares of the outputs of the second product."""

# Words of an instruction. Its arguments follow.
KERNEL, TILE_COUNT, TILE_SIZE, TILE_FACTOR = range(4)
"""The kernel's address, and its number of tiles: ceil(header[count] / size) * factor."""
ARGUMENTS = 4
INSTRUCTION_WORDS = 22

# Words of a team's memory, each in a cache line of its own.
TICKET, DONE, STOP = 0, 8, 16
TILES, PROGRAM, HEADER, END = 24, 25, 26, 27
WAIT, POST, YIELD = 28, 29, 30
"""Addresses of sem_wait, sem_post and sched_yield."""
SHARE_SHIFT = 31
"""A thread takes the number of tiles that are left, shifted right by so many bits."""
SLEEPERS = 32
"""Two cache lines for each worker: whether it sleeps, and its semaphore."""
WORKER_WORDS, SEMAPHORE = 16, 8
"""Words of a worker, and its semaphore's place among them. POSIX's sem_t takes 32 bytes."""

# A ticket's bits: the number of the run, of the instruction, and of the tiles that are left.
RUN_SHIFT, INSTRUCTION_SHIFT = 40, 24


def words_of_block(group: int) -> int:
    """Return W: nibble k of word j of a block of 8 W inputs has the code of input k W + j."""
    return min(4, group // INPUTS_OF_WORD)


def inputs_together(form: Form) -> int:
    """Return the number of inputs whose scales, and then codes, are together in a panel.

    Codes then begin at a cache line: 16 scales of 16 bits are half a line.
    """
    if form.has_units:
        return UNIT_INPUTS
    return form.group * (2 if form.scale_bits == 16 and not form.has_offsets else 1)


def format_name(form: Form, in_words: bool = False) -> str:
    """Return the name of the format of a quantised matrix, such as "int4-g32-offsets".

    ``in_words`` is for codes of 8 bits in words. They take six bits there if that is enough.
    """
    words = "-words" * (in_words and form.codes == "int8")
    if in_words and form.has_six_bits:
        words = "-sextets"
    return (
        f"{form.codes}-g{form.group}"
        + "-offsets" * form.has_offsets
        + "-units" * form.has_units
        + "-halves" * (form.scale_bits == 16)
        + words
    )


def rounding_of(form: Form) -> str | None:
    """Return the name of the kernel that rounds rows for products with a form, or None.

    Rows are cut into segments, where weights and numbers of a row have one scale each. The order of
    the numbers in a segment is the order of the form's codes in words.
    """
    if form.codes == "float8_e4m3fn":
        return None
    offsets = form.has_offsets and (form.codes == "int4" or form.has_six_bits)
    segment = min(form.group, ACTIVATION_GROUP)
    same = replace(form, group=segment, has_offsets=offsets, scale_bits=32)
    return f"round_rows[{format_name(same, in_words=True)}]"


def segment_words(segment: int) -> int:
    """Return the words of 32 bits of a segment of a rounded row."""
    return segment // 4 + SEGMENT_NUMBERS


def rounded_words(num_inputs: int, segment: int) -> int:
    """Return the words of 32 bits of a rounded row. Segments fill whole groups of 32 inputs."""
    num_segments = ceil_div(num_inputs, ACTIVATION_GROUP) * (ACTIVATION_GROUP // segment)
    return num_segments * segment_words(segment)
