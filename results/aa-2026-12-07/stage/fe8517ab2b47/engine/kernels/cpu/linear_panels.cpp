// Many rows of x (prefill) without AMX: W goes by in panels of 2 * LANES columns of y, the weights of one k side by side.
//
// As many panels as a core's L2 holds are packed, and meet all rows of x before the next are; ROWS rows of x stay in L1 meanwhile.  Each
// step of k is two loads of weights and ROWS broadcasts for 2 * ROWS products (the register tile of Goto and van de Geijn 2008).

#include "vector.h"

namespace {

#ifdef __AVX512F__
constexpr int ROWS = 12;
#else
constexpr int ROWS = 6;  // 12 sums, two weights and a broadcast: 15 of 16 registers
#endif
constexpr int64_t WIDTH = 2 * LANES;
constexpr int64_t GROUP_BYTES = 256 << 10;  // packed panels that stay in L2, beside the rows of x

// sums[r] of ROWS rows of x [., K] and a panel [K, WIDTH].
inline void tile(const float* x, const float* panel, int64_t K, Vector sums[ROWS][2]) {
    Vector held[ROWS][2] = {};
#pragma GCC unroll 4
    for (int64_t k = 0; k < K; ++k, panel += WIDTH) {
        const Vector first = load(panel), second = load(panel + LANES);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
            const Vector one = all(x[r * K + k]);
            held[r][0] += one * first;
            held[r][1] += one * second;
        }
    }
    std::memcpy(sums, held, sizeof(held));
}

// Columns n and on of y's row; `gated`: the first LANES columns are gates, the others what they open.
inline void store_row(float* y, int64_t columns, Vector first, Vector second, bool gated) {
    if (gated) first = first / (1.f + exponential(-first)) * second;
    if (columns >= (gated ? LANES : WIDTH)) {
        store(y, first);
        if (!gated) store(y + LANES, second);
    } else {
        float held[WIDTH];
        store(held, first);
        store(held + LANES, second);
        std::memcpy(y, held, 4 * columns);
    }
}

}  // namespace

// y [T, N] = x [T, K] times W [N, K] transposed, T >= ROWS; `gated`: W is [2 * N, K], gates first, and y their SwiGLU.
void many_rows(const float* x, const float* w, float* y, int64_t T, int64_t K, int64_t N, bool gated) {
    static thread_local Scratch packed;
    const int64_t columns = gated ? LANES : WIDTH, panels = (N + columns - 1) / columns, size = K * WIDTH;
#pragma omp parallel
    {
        const int64_t threads = omp_get_num_threads(), most = std::max<int64_t>(1, GROUP_BYTES / (4 * size));
        const int64_t groups = std::min(panels, (panels + most * threads - 1) / (most * threads) * threads);
        float* group = packed.get<float>((panels + groups - 1) / groups * size);
#pragma omp for schedule(dynamic, 1)
        for (int64_t g = 0; g < groups; ++g) {
            const int64_t first = panels * g / groups, count = panels * (g + 1) / groups - first;
            for (int64_t p = 0; p < count; ++p) {
                const int64_t n = (first + p) * columns, other = gated ? N + n : n + LANES, left = N - n;
                transpose_rows(w + n * K, int(std::min<int64_t>(LANES, left)), K, group + p * size, WIDTH);
                const int64_t others = gated ? left : left - LANES;
                transpose_rows(w + other * K, int(std::clamp<int64_t>(others, 0, LANES)), K, group + p * size + LANES, WIDTH);
            }
            for (int64_t top = 0; top < T; top += ROWS) {
                const int64_t t = std::min(top, T - ROWS);  // the last rows meet those before once more
                for (int64_t p = 0; p < count; ++p) {
                    Vector sums[ROWS][2];
                    tile(x + t * K, group + p * size, K, sums);
                    const int64_t n = (first + p) * columns;
                    for (int r = 0; r < ROWS; ++r) store_row(y + (t + r) * N + n, N - n, sums[r][0], sums[r][1], gated);
                }
            }
        }
    }
}
