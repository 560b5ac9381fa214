"""List the mutants of the `jit` backend: its kernels, its recorder, its headers and its threads."""

from __future__ import annotations

from mutation.mutant import Mutant

ROOM = "mie/ops_jit/"
LINEAR = ROOM + "kernels/linear.py"
PRODUCTS = ROOM + "kernels/products.py"
ATTENTION = ROOM + "kernels/attention.py"
ELEMENTWISE = ROOM + "kernels/elementwise.py"
FORMATS = ROOM + "kernels/formats.py"
KERNEL_TEAM = ROOM + "kernels/team.py"
OPERATORS = ROOM + "operators.py"
PROGRAM = ROOM + "program.py"
STEP = ROOM + "step.py"
BACKEND = ROOM + "jit_backend.py"
CACHE = ROOM + "kernel_cache.py"
PANELS = ROOM + "panels.py"
TEAM = ROOM + "team.py"

WRONG_NUMBERS = "logits differ from the plain operators'"

JIT_MUTANTS = (
    # Kernels.
    Mutant(
        "rows-of-another-tile",
        LINEAR,
        "            word(args, 8), x + first * k * 4, w + column",
        "            word(args, 8), x, w + column",
        "the second tile of rows repeats the first",
    ),
    Mutant(
        "last-panel-dropped",
        LINEAR,
        "panels = min(PANELS, (n - column + 15) // 16)",
        "panels = min(PANELS, (n - column) // 16)",
        "the last outputs of a matrix are not computed",
    ),
    Mutant(
        "bias-of-the-first-panel",
        LINEAR,
        "v = v + load_first(bias + 4 * at, count)",
        "v = v + load_first(bias + 4 * column, count)",
        WRONG_NUMBERS,
    ),
    Mutant(
        "bias-without-its-tail",
        LINEAR,
        "v = v + load_first(bias + 4 * at, count)",
        "v = v + load_first(bias + 4 * at, count // 16 * 16)",
        WRONG_NUMBERS,
    ),
    Mutant(
        "last-pass-of-inputs-dropped",
        LINEAR,
        "for first in range(0, k, K_BLOCK):",
        "for first in range(0, max(1, k - K_BLOCK), K_BLOCK):",
        "inputs past the last multiple of 512 do not count",
    ),
    Mutant(
        "passes-not-joined",
        LINEAR,
        "rows, panels, min(first, 1),",
        "rows, panels, 0,",
        "only the last 512 inputs count",
    ),
    Mutant(
        "one-input-short",
        PRODUCTS,
        'b.cbranch(b.icmp_signed("<", k, self.count), body, after)',
        'b.cbranch(b.icmp_signed("<", b.add(k, I64(1)), self.count), body, after)',
        WRONG_NUMBERS,
    ),
    Mutant(
        "window-one-longer",
        ATTENTION,
        "first = max(0, last - window) if window > 0 else 0",
        "first = max(0, last - window - 1) if window > 0 else 0",
        "a query sees one position before its window",
    ),
    Mutant(
        "future-seen",
        ATTENTION,
        "last = position + row // group + 1",
        "last = position + row // group + 2",
        "a query sees the next token",
    ),
    Mutant(
        "heads-share-a-position",
        ATTENTION,
        "last = position + row // group + 1",
        "last = position + row % group + 1",
        "a query's heads see different positions",
    ),
    Mutant(
        "part-merged-unscaled",
        ATTENTION,
        "store(whole + i, fma(load(whole + i), old, load(part + i) * new))",
        "store(whole + i, fma(load(whole + i), old, load(part + i)))",
        "a part of a long context weighs too much",
    ),
    Mutant(
        "largest-of-the-parts-not-kept",
        ATTENTION,
        "    set_number(whole, 0, top)\n",
        "",
        "a third part is scaled by the wrong maximum",
    ),
    Mutant(
        "first-part-merged-only",
        ATTENTION,
        "for part in range(first, first + count):",
        "for part in range(first, first + count - 1):",
        "the newest positions of a long context are not seen",
    ),
    Mutant(
        "old-values-not-rescaled",
        ATTENTION,
        "        if before != highest:\n",
        "        if before > highest:\n",
        WRONG_NUMBERS,
    ),
    Mutant(
        "values-without-scales",
        ATTENTION,
        "                        v = v * load_first(scales + 4 * i, count - i)\n",
        "",
        "values of an int8 cache are not widened",
    ),
    Mutant(
        "rope-turns-back",
        ELEMENTWISE,
        "set_number(out, half + i, fma1(second, cos, first * sin))",
        "set_number(out, half + i, fma1(second, cos, -(first * sin)))",
        WRONG_NUMBERS,
    ),
    Mutant(
        "norm-forgets-its-tail",
        ELEMENTWISE,
        "    mean = sum_of(fma(v, v, total)) / np.float32(dim)\n",
        "    mean = sum_of(total) / np.float32(dim)\n",
        WRONG_NUMBERS,
    ),
    Mutant(
        "norm-without-eps",
        ELEMENTWISE,
        "math.sqrt(mean + eps)",
        "math.sqrt(mean)",
        "rows of small numbers explode",
    ),
    Mutant(
        "silu-of-up",
        ELEMENTWISE,
        "return gate / (one + exp(everywhere(np.float32(0)) - gate)) * up",
        "return gate / (one + exp(everywhere(np.float32(0)) - up)) * up",
        WRONG_NUMBERS,
    ),
    Mutant(
        "keys-scaled-as-values",
        ELEMENTWISE,
        "quantise(scratch, padded, value_scales + (base + offset) * 4)",
        "quantise(scratch, padded, key_scales + (base + offset) * 4)",
        "an int8 cache widens keys with the scale of values",
    ),
    Mutant(
        "int8-without-sign",
        FORMATS,
        "b.sitofp(b.sext(load_lanes(b, address, I8), lanes(I32)), VECTOR)",
        "b.sitofp(b.zext(load_lanes(b, address, I8), lanes(I32)), VECTOR)",
        "negative numbers of an int8 cache are read as large ones",
    ),
    Mutant(
        "bfloat16-in-the-low-half",
        FORMATS,
        "b.bitcast(b.shl(bits, splat(I32, 16)), VECTOR)",
        "b.bitcast(b.shl(bits, splat(I32, 15)), VECTOR)",
        WRONG_NUMBERS,
    ),
    # Threads.
    Mutant(
        "count-read-late",
        KERNEL_TEAM,
        "if fetch_add(done_at, 1) + 1 == tiles:",
        "if fetch_add(done_at, 1) + 1 == word(team, TILES):",
        "a stalled thread ends an instruction a second time",
    ),
    Mutant(
        "tile-not-claimed",
        KERNEL_TEAM,
        "            if swap_if(ticket_at, ticket, ticket - 1) == 0:\n                continue\n",
        "            swap_if(ticket_at, ticket, ticket - 1)\n",
        "two threads do the same tile",
    ),
    Mutant(
        "count-not-reset",
        KERNEL_TEAM,
        "                set_word(team, DONE, 0)\n",
        "",
        "the second instruction never ends",
    ),
    Mutant(
        "sleeps-without-a-look",
        KERNEL_TEAM,
        "if acquire(ticket_at) >> RUN_SHIFT == run or exchange(at, 0) == 0:",
        "if True:",
        "a worker sleeps through the run that has begun",
    ),
    Mutant(
        "number-of-the-run-not-wrapped",
        KERNEL_TEAM,
        " & LAST_RUN",
        "",
        "after 8 million steps nothing is computed",
    ),
    Mutant(
        "tickets-read-without-order",
        KERNEL_TEAM,
        'b.load_atomic(pointer(b, at, I64), "acquire", 8)',
        'b.load_atomic(pointer(b, at, I64), "monotonic", 8)',
        "on ARM, a thread reads an instruction before its ticket",
    ),
    Mutant(
        "tickets-set-without-order",
        KERNEL_TEAM,
        'b.store_atomic(value, pointer(b, at, I64), "seq_cst", 8)',
        'b.store_atomic(value, pointer(b, at, I64), "monotonic", 8)',
        "on ARM, a ticket is seen before its instruction",
    ),
    Mutant(
        "one-lock-for-forks",
        TEAM,
        "self._locks.setdefault(os.getpid(), threading.Lock())",
        "self._locks.setdefault(0, threading.Lock())",
        "a child that is forked while a thread computes waits forever",
    ),
    Mutant(
        "threads-of-the-parent",
        TEAM,
        "            if os.getpid() != self._pid:\n                self._start()\n",
        "",
        "a child that is forked in the middle of a run goes on with its state",
    ),
    # The recorder.
    Mutant(
        "buffer-shared-one-early",
        PROGRAM,
        "storage.buffer, free_from[buffer] = buffer, storage.last_use + 1",
        "storage.buffer, free_from[buffer] = buffer, storage.last_use",
        "an instruction overwrites what it reads",
    ),
    Mutant(
        "buffer-of-another-width",
        PROGRAM,
        "if own == key and free_from[buffer] <= begin:",
        "if own[0] == key[0] and free_from[buffer] <= begin:",
        "a result is written past the end of its buffer",
    ),
    Mutant(
        "capacity-before-memory",
        PROGRAM,
        "        self._capacity = dict.fromkeys(needed, 0)\n",
        "        self._capacity = needed\n",
        "after an interrupt a step uses memory that was freed",
    ),
    Mutant(
        "capacity-of-the-first-step",
        PROGRAM,
        "        if all(needed[rows] <= capacity[rows] for rows in needed):\n",
        "        if all(capacity.values()):\n",
        "a longer step writes past the end of its buffers",
    ),
    Mutant(
        "program-of-another-model",
        BACKEND,
        "self._recorded is None or self._recorded[0]() != forward:",
        "self._recorded is None:",
        "a second model computes with the weights of the first",
    ),
    Mutant(
        "residual-dropped",
        OPERATORS,
        "num_outputs, weight.bias, residual, rows,",
        "num_outputs, weight.bias, None, rows,",
        WRONG_NUMBERS,
    ),
    # Headers, weights and the cache.
    Mutant(
        "starts-and-lengths-swapped",
        STEP,
        "(layout.LENGTHS, batch.seq_lens),",
        "(layout.LENGTHS, batch.cu_seqlens_q[1:]),",
        WRONG_NUMBERS,
    ),
    Mutant(
        "queries-of-the-next-sequence",
        STEP,
        "items[:, 2] = np.minimum(num_queries, counts[sequence] - items[:, 1])",
        "items[:, 2] = num_queries",
        "an item attends for queries of the next sequence",
    ),
    Mutant(
        "one-part-too-few",
        STEP,
        "(lengths - 1) // layout.PART + 1",
        "lengths // layout.PART",
        "the newest positions of a long context are not seen",
    ),
    Mutant(
        "partial-results-not-grown",
        STEP,
        "        if size > self._partials.size:\n",
        "        if not self._partials.size:\n",
        "partial results are written past the end of their memory",
    ),
    Mutant(
        "last-rows-of-a-block-dropped",
        PANELS,
        "*range(max(last * LANES, row), end)]",
        "*range(max(last * LANES, row), end - 1)]",
        "the last output of a matrix is zero",
    ),
    Mutant(
        "key-without-cpu",
        CACHE,
        "repr((*cpu, compiler))",
        "repr(compiler)",
        "a home that two machines share crashes one of them",
    ),
    Mutant(
        "key-without-layout",
        CACHE,
        'folder / "layout.py", ',
        "",
        "an update of mie reads arguments at the wrong places",
    ),
    Mutant(
        "digest-not-checked",
        CACHE,
        "if hashlib.sha256(code).digest() == content[:DIGEST_BYTES]:",
        "if len(content) > DIGEST_BYTES:",
        "a damaged file is run as code",
    ),
    Mutant(
        "links-followed",
        CACHE,
        "if is_private_file(path):",
        "if path.is_file():",
        "a file that others can write is run as code",
    ),
    Mutant(
        "interrupt-lost",
        CACHE,
        "            with suppress(FileNotFoundError):",
        "            if True:",
        "a Ctrl-C while a kernel is stored is ignored",
    ),
)
