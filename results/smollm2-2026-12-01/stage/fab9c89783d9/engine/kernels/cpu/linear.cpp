// y = x W^T in float32, x [T, K], W [N, K] row by row as checkpoints have it.  Two forms:
//
// Few rows (decode): memory bound.  A vector's lanes are tokens: W is read once, in file order, each weight multiplied into all tokens.
//
// Many rows (prefill), where the CPU has AMX: a float32 number is the exact sum of three bfloat16 numbers (8 + 8 + 8 bits), so
//     x w = sum over planes i, j of x_i w_j,   bfloat16 products, float32 sums (TDPBF16PS, Intel ISA reference, AMX-BF16)
// without the terms i + j > 2, which are below float32's rounding of the largest.  Weights whose third or second plane is zero (as in a
// checkpoint made from fewer bits) need 5 or 3 products instead of 6.  (Splitting as in Henry, Tang, Heinecke 2019, arXiv:1904.06376.)
//
// A row's result depends on that row, W and the form alone, not on the rows beside it or on the number of threads.

#include "vector.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define HAS_AMX 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#ifdef __AVX512F__
constexpr int GROUP = 24;
#else
constexpr int GROUP = 12;
#endif
constexpr int LINE = 16;  // floats of a cache line

// Tokens as lanes: out[k] holds x[0..LANES) at k, absent rows as zero.
void transpose_rows(const float* x, int rows, int64_t K, float* out) {
    int64_t k = 0;
    for (; k + LANES <= K; k += LANES) {
        Vector square[LANES];
        for (int t = 0; t < LANES; ++t) square[t] = t < rows ? load(x + t * K + k) : Vector{};
        transpose(square);
        for (int i = 0; i < LANES; ++i) store(out + (k + i) * LANES, square[i]);
    }
    for (; k < K; ++k)
        for (int t = 0; t < LANES; ++t) out[k * LANES + t] = t < rows ? x[t * K + k] : 0.f;
}

// Sums of COUNT columns, tokens as lanes, to y [rows, N].
template <int COUNT> inline void store_columns(const Vector* sums, float* y, int64_t N, int rows) {
    for (int n = 0; n < COUNT; n += LANES) {
        constexpr int LAST = COUNT % LANES ? COUNT % LANES : LANES;
        Vector square[LANES];
        for (int i = 0; i < LANES; ++i) square[i] = n + i < COUNT ? sums[n + i] : Vector{};
        transpose(square);
        for (int t = 0; t < rows; ++t) std::memcpy(y + t * N + n, &square[t], 4 * (n + LANES <= COUNT ? LANES : LAST));
    }
}

// At step k of a group: the next group to L2 in file order; of this group, what is 32 and more steps away to L1, a row or two a step
// (all rows at once, every 16 steps, was a tenth slower).  Inlined by force: g++ 12 drops a call that only fetches.
[[gnu::always_inline]] inline void fetch_ahead(const float* w, int64_t k, int64_t K) {
    const float* next = w + GROUP * K + k * GROUP;
    __builtin_prefetch(next, 0, 2);
    if (GROUP > LINE) __builtin_prefetch(next + LINE, 0, 2);
    constexpr int TOGETHER = GROUP / 12;
    if (k % LINE < 12)
        for (int i = 0; i < TOGETHER; ++i) __builtin_prefetch(w + (k % LINE * TOGETHER + i) * K + (k / LINE + 2) * LINE, 0, 3);
}

// COUNT rows of W against LANES tokens.
template <int COUNT> void few_rows_group(const float* lanes, const float* w, int64_t K, float* y, int64_t N, int rows) {
    Vector sums[COUNT];
    for (auto& one : sums) one = Vector{};
    for (int64_t k = 0; k < K; ++k) {
        Vector x = load(lanes + k * LANES);
#pragma GCC unroll 24
        for (int n = 0; n < COUNT; ++n) sums[n] += x * w[n * K + k];
        if (COUNT == GROUP) fetch_ahead(w, k, K);
    }
    store_columns<COUNT>(sums, y, N, rows);
}

void few_rows(const float* x, const float* w, float* y, int64_t T, int64_t K, int64_t N) {
    static Scratch held;
    int64_t blocks = (T + LANES - 1) / LANES;
    float* lanes = held.get<float>(blocks * K * LANES);
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t b = 0; b < blocks; ++b)
            transpose_rows(x + b * LANES * K, int(std::min<int64_t>(LANES, T - b * LANES)), K, lanes + b * K * LANES);
        int64_t groups = (N + GROUP - 1) / GROUP, threads = omp_get_num_threads(), me = omp_get_thread_num();
        for (int64_t g = groups * me / threads; g < groups * (me + 1) / threads; ++g) {
            int64_t n = g * GROUP;
            for (int64_t b = 0; b < blocks; ++b) {
                const float* in = lanes + b * K * LANES;
                float* out = y + b * LANES * N + n;
                int rows = int(std::min<int64_t>(LANES, T - b * LANES));
                if (n + GROUP <= N)
                    few_rows_group<GROUP>(in, w + n * K, K, out, N, rows);
                else
                    for (int64_t m = n; m < N; ++m) few_rows_group<1>(in, w + m * K, K, y + b * LANES * N + m, N, rows);
            }
        }
    }
}

// silu(gate) * up for rows [2 * inner] of x, gate first.
void gate(const float* x, float* y, int64_t T, int64_t inner) {
#pragma omp parallel for schedule(static) collapse(2)
    for (int64_t t = 0; t < T; ++t)
        for (int64_t i = 0; i < inner; i += LANES) {
            const float *g = x + 2 * t * inner + i, *u = g + inner;
            float* out = y + t * inner + i;
            if (i + LANES <= inner) {
                store(out, load(g) / (1.f + exponential(-load(g))) * load(u));
            } else {
                for (int64_t j = 0; j < inner - i; ++j) out[j] = g[j] / (1.f + exponential(all(-g[j]))[0]) * u[j];
            }
        }
}

#ifdef HAS_AMX

constexpr int TILE = 16, DEPTH = 32, PLANES = 3;     // a tile: 16 rows of 32 bfloat16 (or 16 float32); 1 KiB
constexpr size_t TILE_BYTES = 1024;
constexpr size_t ROWS_BYTES = 1100 << 10;            // planes of a block of x rows, to stay in a core's L2
constexpr size_t WEIGHT_BYTES = 12 << 20;            // planes of a slab of W

struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t columns[16] = {};
    uint8_t rows[16] = {};
    TileConfig() {
        for (int i = 0; i < 8; ++i) columns[i] = 64, rows[i] = 16;
    }
};

inline void split(__m512 a, __m512 b, __m512i planes[PLANES], int count) {
    for (int p = 0; p < count; ++p) {
        __m512i both = (__m512i)_mm512_cvtne2ps_pbh(b, a);
        planes[p] = both;
        a = _mm512_sub_ps(a, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(both)), 16)));
        b = _mm512_sub_ps(b, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(both, 1)), 16)));
    }
}

inline void load32(const float* from, int64_t left, __m512& a, __m512& b) {
    if (left >= 32) {
        a = _mm512_loadu_ps(from), b = _mm512_loadu_ps(from + 16);
    } else {
        uint32_t mask = left <= 0 ? 0 : (1u << left) - 1;
        a = _mm512_maskz_loadu_ps(__mmask16(mask), from), b = _mm512_maskz_loadu_ps(__mmask16(mask >> 16), from + 16);
    }
}

// 16 rows of x as tiles [PLANES][K / 32]; absent rows and columns are zero.
void pack_rows(const float* x, int64_t rows, int64_t K, char* out) {
    const int64_t plane = (K + DEPTH - 1) / DEPTH * TILE_BYTES;
    for (int64_t k = 0; k < K; k += DEPTH, out += TILE_BYTES)
        for (int r = 0; r < TILE; ++r) {
            __m512 a = _mm512_setzero_ps(), b = a;
            if (r < rows) load32(x + r * K + k, K - k, a, b);
            __m512i planes[PLANES];
            split(a, b, planes, PLANES);
            for (int p = 0; p < PLANES; ++p) _mm512_store_si512(out + p * plane + r * 64, planes[p]);
        }
}

// How many planes hold `count` weights exactly.
int planes_needed(const float* w, int64_t count) {
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);  // minus zero is zero
    __m512i second = _mm512_setzero_si512(), third = second;
    for (int64_t i = 0; i < count; i += DEPTH) {
        __m512 a, b;
        load32(w + i, count - i, a, b);
        __m512i planes[PLANES];
        split(a, b, planes, PLANES);
        second = _mm512_or_si512(second, planes[1]), third = _mm512_or_si512(third, planes[2]);
    }
    return _mm512_test_epi16_mask(third, magnitude) ? 3 : _mm512_test_epi16_mask(second, magnitude) ? 2 : 1;
}

// 16 rows of W as tiles [COUNT][K / 32] of pairs: row p of a tile holds w[n][2p], w[n][2p+1] for 16 n.
template <int COUNT> void pack_weights(const float* w, int64_t rows, int64_t K, char* out) {
    const int64_t plane = (K + DEPTH - 1) / DEPTH * TILE_BYTES;
    for (int64_t k = 0; k < K; k += DEPTH, out += TILE_BYTES) {
        Vector tiles[COUNT][TILE];
        for (int r = 0; r < TILE; ++r) {
            __m512 a = _mm512_setzero_ps(), b = a;
            if (r < rows) load32(w + r * K + k, K - k, a, b);
            __m512i planes[COUNT];
            split(a, b, planes, COUNT);
            for (int p = 0; p < COUNT; ++p) tiles[p][r] = (Vector)planes[p];
        }
        for (int p = 0; p < COUNT; ++p) {
            transpose(tiles[p]);
            for (int r = 0; r < TILE; ++r) std::memcpy(out + p * plane + r * 64, &tiles[p][r], 64);
        }
    }
}

// Tiles: 0..3 sums, 4 and 5 of x, 6 and 7 of W.
inline void products() {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
}

inline void load_x(const char* x0, const char* x1) {
    _tile_loadd(4, x0, 64);
    _tile_loadd(5, x1, 64);
}

inline void load_w(const char* w0, const char* w1) {
    _tile_loadd(6, w0, 64);
    _tile_loadd(7, w1, 64);
}

// 32 rows of x against 32 rows of W (`planes` of them), all packed, the second 16 rows `packed` bytes behind the first.  Meanwhile
// `lines` cache lines for each 32 of K are fetched from `ahead`, and as far behind it.
void block(const char* x, const char* w, int64_t packed, int64_t depth, int planes, const char* ahead, int lines) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const int64_t plane = depth * TILE_BYTES;
    for (int64_t k = 0; k < depth; ++k, x += TILE_BYTES, w += TILE_BYTES) {
        for (int i = 0; i < lines; ++i, ahead += 64) {
            __builtin_prefetch(ahead, 0, 2);
            __builtin_prefetch(ahead + packed, 0, 2);
        }
        load_w(w, w + packed);
        load_x(x + 2 * plane, x + 2 * plane + packed);
        products();
        load_x(x + plane, x + plane + packed);
        products();
        if (planes > 1) {
            load_w(w + plane, w + plane + packed);
            products();
        }
        load_x(x, x + packed);
        if (planes > 1) products();
        if (planes > 2) {
            load_w(w + 2 * plane, w + 2 * plane + packed);
            products();
        }
        if (planes > 1) load_w(w, w + packed);
        products();
    }
}

inline void store32(float* y, int64_t N) {
    _tile_stored(0, y, N * 4);
    _tile_stored(1, y + TILE, N * 4);
    _tile_stored(2, y + TILE * N, N * 4);
    _tile_stored(3, y + TILE * N + TILE, N * 4);
}

// The 32 x 32 sums to rows and columns of y [., N] that exist.
void store_sums(float* y, int64_t N, int64_t rows, int64_t columns) {
    if (rows >= 32 && columns >= 32) return store32(y, N);
    alignas(64) float held[32 * 32];
    store32(held, 32);
    for (int64_t t = 0; t < std::min<int64_t>(rows, 32); ++t) std::memcpy(y + t * N, held + t * 32, 4 * std::min<int64_t>(columns, 32));
}

// The first 16 of 32 columns are gates, the others what they open: silu(gate) * up to y [., N].
void store_gated(float* y, int64_t N, int64_t rows, int64_t columns) {
    alignas(64) float held[32 * 32], opened[TILE];
    store32(held, 32);
    for (int64_t t = 0; t < std::min<int64_t>(rows, 32); ++t) {
        Vector g = load(held + t * 32);
        store(opened, g / (1.f + exponential(-g)) * load(held + t * 32 + TILE));
        std::memcpy(y + t * N, opened, 4 * std::min<int64_t>(columns, TILE));
    }
}

// As few_rows; `gated`: W is [2 * N, K], gates first, and y [T, N] their SwiGLU.
void many_rows(const float* x, const float* w, float* y, int64_t T, int64_t K, int64_t N, bool gated) {
    static Scratch weight_tiles, plane_counts;
    static thread_local Scratch row_tiles;
    const int64_t depth = (K + DEPTH - 1) / DEPTH, packed = depth * PLANES * TILE_BYTES;  // bytes of 16 packed rows
    const int64_t width = gated ? 16 : 32;                            // columns of y a step
    const int64_t strips = (T + 31) / 32, columns = (N + width - 1) / width;
    const int64_t slab = std::min(columns, std::max<int64_t>(1, int64_t(WEIGHT_BYTES) / (2 * packed)));
    char* wt = weight_tiles.get<char>((2 * slab + 2) * packed);
    uint8_t* planes = plane_counts.get<uint8_t>(slab);
#pragma omp parallel
    {
        static const TileConfig config;
        _tile_loadconfig(&config);
        const int64_t threads = omp_get_num_threads(), tallest = std::max<int64_t>(1, int64_t(ROWS_BYTES) / (2 * packed));
        const int64_t blocks = std::min(strips, (strips + tallest * threads - 1) / (tallest * threads) * threads);
        const int64_t shares = (threads + blocks - 1) / blocks;  // of W, when there are fewer blocks of x than threads
        char* xt = row_tiles.get<char>(2 * ((strips + blocks - 1) / blocks) * packed);
        for (int64_t first = 0; first < columns; first += slab) {
            const int64_t here = std::min(slab, columns - first);
#pragma omp for schedule(static)
            for (int64_t i = 0; i < here; ++i) {
                const int64_t n = (first + i) * width, other = n + (gated ? N : TILE);
                const int64_t rows = std::min<int64_t>(TILE, N - n), others = gated ? rows : std::clamp<int64_t>(N - other, 0, TILE);
                planes[i] = uint8_t(std::max(planes_needed(w + n * K, rows * K), planes_needed(w + other * K, others * K)));
                const auto pack = planes[i] == 1 ? pack_weights<1> : planes[i] == 2 ? pack_weights<2> : pack_weights<3>;
                pack(w + n * K, rows, K, wt + 2 * i * packed);
                pack(w + other * K, others, K, wt + (2 * i + 1) * packed);
            }
#pragma omp for schedule(dynamic, 1)
            for (int64_t item = 0; item < blocks * shares; ++item) {
                const int64_t b = item / shares, share = item % shares;
                const int64_t top = strips * b / blocks, height = strips * (b + 1) / blocks - top;
                for (int64_t i = 0; i < 2 * height; ++i) {
                    const int64_t t = top * 32 + i * TILE;
                    pack_rows(x + t * K, T - t, K, xt + i * packed);
                }
                for (int64_t i = here * share / shares; i < here * (share + 1) / shares; ++i) {
                    const int64_t n = (first + i) * width;
                    const int lines = int((planes[i] * TILE_BYTES / 64 + height - 1) / height);
                    for (int64_t j = 0; j < height; ++j) {
                        const int64_t t = (top + j) * 32;
                        block(xt + 2 * j * packed, wt + 2 * i * packed, packed, depth, planes[i],
                              wt + (2 * i + 2) * packed + j * depth * lines * 64, lines);
                        (gated ? store_gated : store_sums)(y + t * N + n, N, T - t, N - n);
                    }
                }
            }
        }
        _tile_release();
    }
}
#endif

constexpr int64_t FEW = 64;  // rows up to which W is better read once than split
bool with_amx = false;

}  // namespace

// The widest instructions this library was compiled for and may use; null when there are none that it is worth using for.
extern "C" const char* instructions() {
#ifdef HAS_AMX
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;  // Linux, Documentation/arch/x86/xstate.rst
    with_amx = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    if (with_amx) return "amx-bf16x3";
#endif
#if defined(__AVX512F__)
    return "avx512";
#elif defined(__AVX2__) && defined(__FMA__)
    return "avx2";
#else
    return nullptr;
#endif
}

// Rows up to which `linear` and `swiglu` are to be used, beyond which a library's product is faster.
extern "C" int64_t most_rows() { return with_amx ? INT64_MAX : FEW; }

// y [T, N] = x [T, K] times W [N, K] transposed.
extern "C" void linear(const float* x, const float* w, float* y, int64_t T, int64_t K, int64_t N) {
#ifdef HAS_AMX
    if (T > FEW && with_amx) return many_rows(x, w, y, T, K, N, false);
#endif
    few_rows(x, w, y, T, K, N);
}

// y [T, inner] = silu(x W_gate^T) * (x W_up^T), W [2 * inner, K] with the gates first (SwiGLU, Shazeer 2020).
extern "C" void swiglu(const float* x, const float* w, float* y, int64_t T, int64_t K, int64_t inner) {
#ifdef HAS_AMX
    if (T > FEW && with_amx) return many_rows(x, w, y, T, K, inner, true);
#endif
    static Scratch both;
    float* gate_up = both.get<float>(T * 2 * inner);
    few_rows(x, w, gate_up, T, K, 2 * inner);
    gate(gate_up, y, T, inner);
}
