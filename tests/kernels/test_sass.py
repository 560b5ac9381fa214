"""Check how machine code is read and compared: loops, their instructions, and their ledger."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "scripts"))

import nvrtc_check
from gpu import sass
from gpu.sass import Counts, Part
from gpu.sass_ledger import Profile, growth, resident_warps

NESTED = """
	.section	.text._Z6nestedv,"ax",@progbits
.text._Z6nestedv:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   LDG.E.128.CONSTANT R4, [R2.64] ;
        /*0020*/                   BRA.DIV ~URZ, `(.L_x_5) ;
.L_x_1:
        /*0030*/                   HMMA.16816.F32 R4, R4, R8, R4 ;
        /*0040*/                   BRA.CONV ~URZ, `(.L_x_2) ;
        /*0050*/                   CALL.REL.NOINC `($__internal_0_$warpsync) ;
.L_x_2:
        /*0060*/              @!P0 BRA `(.L_x_1) ;
        /*0070*/               @P2 LDS.U16 R3, [R4] ;
        /*0080*/                   BRA.U !UP0, `(.L_x_0) ;
.L_x_3:
        /*0090*/              @!P0 BRA P1, `(.L_x_3) ;
        /*00a0*/                   STL [R1], R2 ;
        /*00b0*/               @P0 EXIT ;
        /*00c0*/                   STG.E.U16 [R2.64], R4 ;
        /*00d0*/                   EXIT ;
.L_x_5:
        /*00e0*/                   ATOMS.CAST.SPIN.64 R1, [R2], R4, R6 ;
        /*00f0*/                   BRA `(.L_x_1) ;
$__internal_0_$warpsync:
        /*0100*/                   DADD R2, R2, R4 ;
        /*0110*/                   RET.REL.NODEC R2 `(_Z6nestedv) ;
	.section	.text._Z5emptyv,"ax",@progbits
        /*0000*/                   EXIT ;
"""


def part(**counts: int) -> Part:
    return Part(**dict.fromkeys(Part._fields, 0) | counts)


def test_a_loop_owns_what_no_nested_loop_owns():
    (name, listing), (other, _) = sass.read_listings(NESTED)
    assert (name, other) == ("_Z6nestedv", "_Z5emptyv")
    assert sass.count(listing) == Counts(
        local=1,
        outside=part(instructions=5, requests=1, bytes=2),
        loops=(
            part(instructions=4, requests=1, bytes=16, shared=1),
            part(instructions=3, mma=1),
        ),  # the third loop only waits, and is not hot
    )


def test_an_unknown_jump_is_an_error():
    code = NESTED.replace("BRA.U !UP0, `(.L_x_0)", "BRX R2 -0x10")
    with pytest.raises(AssertionError, match="indirect jump: BRX"):
        list(sass.read_listings(code))


DOUBLE = """
__global__ void doubles(const double* x, double* y, int n) {
  __shared__ double bins[32];
  bins[threadIdx.x] = 0.0;
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < n; ++i) atomicAdd(&bins[(int)x[i] % 32], x[i] * 1.5);
  __syncthreads();
  y[threadIdx.x] = bins[threadIdx.x];
}
__global__ void indexed(const int* x, int* y, int n) {
  int values[64];
  for (int i = 0; i < 64; ++i) values[i] = x[i];
  for (int i = 0; i < n; ++i) values[x[i] % 64] += i;
  for (int i = 0; i < 64; ++i) y[i] = values[i];
}
__global__ void once(const float4* x, float4* y) { y[threadIdx.x] = x[threadIdx.x]; }
"""


@pytest.mark.few
@pytest.mark.parametrize("version", nvrtc_check.TARGETS)
@pytest.mark.parametrize("arch", [80, 87, 90])
def test_compiled_loops_are_found(version: str, arch: int):
    compilers, program = nvrtc_check.installed(), sass.nvdisasm()
    if version not in compilers or program is None:
        pytest.skip("NVRTC or nvdisasm is not installed (pip install '.[nvrtc]')")
    names = ["doubles", "indexed", "once"]
    compiled = compilers[version].compile(DOUBLE, names, nvrtc_check.options_for(arch))
    doubles, indexed, once = nvrtc_check.disassemble(program, compiled).values()
    hot = doubles.loops[0]
    assert hot.fp64 >= 2  # a product and an index, and in some compilers the sum
    assert sum(loop.cas for loop in doubles.loops) == 1
    assert sum(loop.bytes for loop in doubles.loops) in (8, 16)
    assert indexed.local > 16  # some of them take four elements
    assert doubles.local == once.local == 0
    assert once.loops == ()
    assert (once.outside.requests, once.outside.bytes) == (2, 32)


LOOP = part(instructions=100, mma=10, requests=4, bytes=64)
BEFORE = Profile(warps=16, local=0, outside=part(instructions=50), loops=(LOOP,))


@pytest.mark.parametrize(
    ("now", "found"),
    [
        (BEFORE, []),
        (BEFORE._replace(warps=20, loops=(LOOP._replace(instructions=90),)), []),
        # Unrolled twice: every iteration does twice the work.
        (BEFORE._replace(loops=(Part(*(2 * count for count in LOOP)),)), []),
        (BEFORE._replace(warps=12), ["resident warps fell from 16 to 12"]),
        (BEFORE._replace(local=3), ["accesses of local memory grew from 0 to 3"]),
        (
            BEFORE._replace(outside=part(instructions=51, fp64=1)),
            [
                "outside of loops, instructions grew from 50 to 51",
                "outside of loops, fp64 grew from 0 to 1",
            ],
        ),
        (
            BEFORE._replace(loops=(LOOP._replace(instructions=107, cas=1),)),
            [
                "loop 0: instructions per MMA grew from 10 to 10.7",
                "loop 0: cas per MMA grew from 0 to 0.1",
            ],
        ),
        (
            BEFORE._replace(loops=(LOOP._replace(mma=0),)),
            ["loop 0 worked by MMA, and works by byte"],
        ),
        (
            BEFORE._replace(loops=(LOOP, LOOP)),
            ["the hot loops were 100, and are 100, 100 (instructions an iteration)"],
        ),
    ],
)
def test_machine_code_that_grows_is_noticed(now: Profile, found: list[str]):
    sentences = [f"k: {sentence} (--update if it is worth it)" for sentence in found]
    assert list(growth({"k": now}, {"k": BEFORE})) == sentences


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared_bytes", "warps"),
    [
        (80, 256, 32, 0, 64),  # the chip's limit
        (90, 32, 32, 0, 32),  # 32 blocks of a warp
        (80, 128, 166, 0, 12),  # three warps in each quarter of the registers
        (80, 128, 32, 64 << 10, 8),  # two blocks of 65 KB in 164 KB
        (120, 128, 32, 99 << 10, 4),
        (120, 128, 32, (99 << 10) + 1, 0),
    ],
)
def test_resident_warps(arch: int, threads: int, registers: int, shared_bytes: int, warps: int):
    found = resident_warps(arch, threads=threads, registers=registers, shared_bytes=shared_bytes)
    assert found == warps
