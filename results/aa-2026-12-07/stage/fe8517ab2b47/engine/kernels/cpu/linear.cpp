// y = x W^T in float32, x [T, K], W [N, K] row by row as checkpoints have it, and SwiGLU over it.  AMX where the CPU has it: linear_few.cpp
// and linear_many.cpp.  Elsewhere many rows: linear_panels.cpp.  Few rows are done here, bound by memory or, on narrow vectors, by products:
// a vector's lanes are tokens, and W is read once, in file order, each weight multiplied into all tokens.
//
// A row's result depends on that row, W and the form alone, not on the rows beside it or on the number of threads.

#include "amx.h"

#ifdef HAS_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

void many_rows(const float* x, const float* w, float* y, int64_t T, int64_t K, int64_t N, bool gated);

namespace {

#ifdef __AVX512F__
constexpr int GROUP = 24;
#else
constexpr int GROUP = 12;
#endif
constexpr int LINE = 16;  // floats of a cache line

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

// At step k of a group of COUNT rows of W: the next group to L2 in file order; of this group, what is 32 and more steps away to L1, a row
// or two a step (all rows at once, every 16 steps, was a tenth slower).  Inlined by force: g++ 12 drops a call that only fetches.
template <int COUNT> [[gnu::always_inline]] inline void fetch_ahead(const float* w, int64_t k, int64_t K) {
    const float* next = w + COUNT * K + k * COUNT;
    __builtin_prefetch(next, 0, 2);
    if (COUNT > LINE) __builtin_prefetch(next + LINE, 0, 2);
    constexpr int TOGETHER = (COUNT + 11) / 12;
    if (k % LINE * TOGETHER < COUNT)
        for (int i = 0; i < TOGETHER; ++i) __builtin_prefetch(w + (k % LINE * TOGETHER + i) * K + (k / LINE + 2) * LINE, 0, 3);
}

// COUNT rows of W against BLOCKS * LANES tokens, of which `rows` are there: each weight is read once for all of them.
template <int COUNT, int BLOCKS, bool FETCH> void few_rows_group(const float* lanes, const float* w, int64_t K, float* y, int64_t N, int rows) {
    Vector sums[BLOCKS][COUNT] = {};
    for (int64_t k = 0; k < K; ++k) {
        Vector x[BLOCKS];
        for (int b = 0; b < BLOCKS; ++b) x[b] = load(lanes + (b * K + k) * LANES);
#pragma GCC unroll 24
        for (int n = 0; n < COUNT; ++n)
            for (int b = 0; b < BLOCKS; ++b) sums[b][n] += x[b] * w[n * K + k];
        if (FETCH) fetch_ahead<COUNT>(w, k, K);
    }
    for (int b = 0; b < BLOCKS; ++b) store_columns<COUNT>(sums[b], y + b * LANES * N, N, std::clamp(rows - b * LANES, 0, LANES));
}

// A thread's rows of W, `first` to `last`, against all tokens, BLOCKS * LANES of them at a time.
template <int BLOCKS> void few_rows_share(const float* lanes, const float* w, float* y, int64_t T, int64_t K, int64_t N, int64_t first, int64_t last) {
    constexpr int COUNT = GROUP / BLOCKS;
    for (int64_t n = first; n < last; n += COUNT)
        for (int64_t t = 0; t < T; t += BLOCKS * LANES) {
            const float* in = lanes + t * K;
            const int rows = int(std::min<int64_t>(BLOCKS * LANES, T - t));
            if (n + COUNT <= last)
                few_rows_group<COUNT, BLOCKS, true>(in, w + n * K, K, y + t * N + n, N, rows);
            else
                for (int64_t m = n; m < last; ++m) few_rows_group<1, BLOCKS, false>(in, w + m * K, K, y + t * N + m, N, rows);
        }
}

void few_rows(const float* x, const float* w, float* y, int64_t T, int64_t K, int64_t N) {
    static Scratch held;
    const int64_t together = T > LANES ? 2 : 1, blocks = (T + LANES - 1) / LANES, padded = (blocks + together - 1) / together * together;
    float* lanes = held.get<float>(padded * K * LANES);
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t b = 0; b < padded; ++b)
            transpose_rows(x + b * LANES * K, int(std::clamp<int64_t>(T - b * LANES, 0, LANES)), K, lanes + b * K * LANES, LANES);
        const int64_t groups = (N + GROUP - 1) / GROUP, threads = omp_get_num_threads(), me = omp_get_thread_num();
        const int64_t first = groups * me / threads * GROUP, last = std::min(N, groups * (me + 1) / threads * GROUP);
        (together == 2 ? few_rows_share<2> : few_rows_share<1>)(lanes, w, y, T, K, N, first, last);
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

constexpr int64_t FEW = 64;  // rows up to which W is better read once than packed
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

// y [T, N] = x [T, K] times W [N, K] transposed.
extern "C" void linear(const float* x, const float* w, float* y, int64_t T, int64_t K, int64_t N) {
#ifdef HAS_AMX
    if (with_amx) return T > FEW ? many_rows_amx(x, w, y, T, K, N, false) : few_rows_amx(x, w, y, T, K, N);
#endif
    if (T > FEW) return many_rows(x, w, y, T, K, N, false);
    few_rows(x, w, y, T, K, N);
}

// y [T, inner] = silu(x W_gate^T) * (x W_up^T), W [2 * inner, K] with the gates first (SwiGLU, Shazeer 2020).
extern "C" void swiglu(const float* x, const float* w, float* y, int64_t T, int64_t K, int64_t inner) {
#ifdef HAS_AMX
    if (T > FEW && with_amx) return many_rows_amx(x, w, y, T, K, inner, true);
#endif
    if (T > FEW) return many_rows(x, w, y, T, K, inner, true);
    static Scratch both;
    float* gate_up = both.get<float>(T * 2 * inner);
    linear(x, w, gate_up, T, K, 2 * inner);
    gate(gate_up, y, T, inner);
}
