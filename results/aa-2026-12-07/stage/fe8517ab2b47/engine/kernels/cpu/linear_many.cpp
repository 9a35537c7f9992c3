// Many rows of x (prefill) on AMX: both operands are packed as tiles, W slab by slab, x as blocks that stay in a core's L2.
// Weights whose third or second plane is zero (as in a checkpoint made from fewer bits) need 5 or 3 products instead of 6.

#include "amx.h"

#ifdef HAS_AMX

namespace {

constexpr size_t ROWS_BYTES = 1100 << 10;  // planes of a block of x rows, to stay in a core's L2
constexpr size_t WEIGHT_BYTES = 3 << 20;  // planes of a slab of W

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

}  // namespace

void many_rows_amx(const float* x, const float* w, float* y, int64_t T, int64_t K, int64_t N, bool gated) {
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
