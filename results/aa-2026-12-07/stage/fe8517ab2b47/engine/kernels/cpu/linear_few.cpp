// Few rows of x (decode) on AMX, bound by memory: W is read once and split into planes on the way.
//
// A tile of W is 16 rows of it by 32 of K as they lie; x is packed once, tokens side by side; a tile of sums is 16 rows of W by 16 tokens.

#include "amx.h"

#ifdef HAS_AMX

namespace {

// Planes by truncation, which takes fewer instructions: each the upper 16 bits of what is left.  Exact as well: 24 bits are 8 + 8 + 8.
inline void split_weights(__m512 a, __m512 b, char* out) {
    static constexpr struct alignas(64) Upper {
        int16_t word[32] = {};
        constexpr Upper() {
            for (int i = 0; i < 32; ++i) word[i] = int16_t(2 * i + 1);
        }
    } upper;
    const __m512i words = _mm512_load_si512(&upper), mask = _mm512_set1_epi32(int(0xffff0000));
    for (int p = 0;; ++p) {
        _mm512_store_si512(out + p * TILE_BYTES, _mm512_permutex2var_epi16(_mm512_castps_si512(a), words, _mm512_castps_si512(b)));
        if (p == PLANES - 1) return;
        a = _mm512_sub_ps(a, _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), mask)));
        b = _mm512_sub_ps(b, _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(b), mask)));
    }
}

// Step k of up to 16 rows of W as a tile of each plane.  WHOLE: 16 rows and all of 32 columns are there; else what is not is zero.
// With each row, two cache lines are fetched from `ahead` on: all of W passes by in file order, evenly, before it is asked for (at once
// for a whole step was a quarter slower: the CPU has 16 places for lines under way, and what is split needs them too).
template <bool WHOLE> inline void split_tile(const float* w, int64_t rows, int64_t K, int64_t k, char* out, const char* ahead) {
    for (int r = 0; r < TILE; ++r) {
        __builtin_prefetch(ahead + r * 128, 0, 2);
        __builtin_prefetch(ahead + r * 128 + 64, 0, 2);
        __m512 a = _mm512_setzero_ps(), b = a;
        if (WHOLE) {
            a = _mm512_loadu_ps(w + r * K + k), b = _mm512_loadu_ps(w + r * K + k + 16);
        } else if (r < rows) {
            load32(w + r * K + k, K - k, a, b);
        }
        split_weights(a, b, out + r * 64);
    }
}

// 16 rows of W (if WHOLE; else `rows` of them) against 16 tokens: `tokens` rows of y [., N].  While one step of K is multiplied the next
// is split, into a buffer that stays in L1.
template <bool WHOLE> void unit(const char* x, const float* w, int64_t rows, int64_t K, float* y, int64_t N, int tokens) {
    const int64_t depth = (K + DEPTH - 1) / DEPTH, plane = depth * TILE_BYTES;
    alignas(64) char planes[2][PLANES * TILE_BYTES];
    const char* ahead = reinterpret_cast<const char*>(w + TILE * K);
    _tile_zero(0);
    split_tile<WHOLE>(w, rows, K, 0, planes[0], ahead);
    for (int64_t k = 0; k < depth; ++k, x += TILE_BYTES) {
        const char* here = planes[k & 1];
        _tile_loadd(1, here, 64);
        _tile_loadd(2, here + TILE_BYTES, 64);
        _tile_loadd(3, here + 2 * TILE_BYTES, 64);
        _tile_loadd(4, x, 64);
        _tile_loadd(5, x + plane, 64);
        _tile_loadd(6, x + 2 * plane, 64);
        _tile_dpbf16ps(0, 3, 4);  // the smallest products first
        _tile_dpbf16ps(0, 2, 5);
        _tile_dpbf16ps(0, 1, 6);
        _tile_dpbf16ps(0, 2, 4);
        _tile_dpbf16ps(0, 1, 5);
        _tile_dpbf16ps(0, 1, 4);
        ahead += TILE * DEPTH * sizeof(float);
        if (k + 1 < depth) split_tile<WHOLE>(w, rows, K, (k + 1) * DEPTH, planes[(k + 1) & 1], ahead);
    }
    Vector square[TILE];
    _tile_stored(0, square, 64);
    transpose(square);
    for (int t = 0; t < tokens; ++t) std::memcpy(y + t * N, &square[t], 4 * (WHOLE ? TILE : rows));
}

}  // namespace

void few_rows_amx(const float* x, const float* w, float* y, int64_t T, int64_t K, int64_t N) {
    static Scratch held;
    const int64_t blocks = (T + TILE - 1) / TILE, packed = (K + DEPTH - 1) / DEPTH * PLANES * TILE_BYTES, units = (N + TILE - 1) / TILE;
    char* xt = held.get<char>(blocks * packed);
#pragma omp parallel
    {
        static const TileConfig config;
        _tile_loadconfig(&config);
#pragma omp for schedule(static)
        for (int64_t b = 0; b < blocks; ++b)
            pack_weights<PLANES>(x + b * TILE * K, std::min<int64_t>(TILE, T - b * TILE), K, xt + b * packed);
        const int64_t threads = omp_get_num_threads(), me = omp_get_thread_num();
        for (int64_t u = units * me / threads; u < units * (me + 1) / threads; ++u) {
            const int64_t n = u * TILE, rows = std::min<int64_t>(TILE, N - n);
            const auto form = rows == TILE && K % DEPTH == 0 ? unit<true> : unit<false>;
            for (int64_t b = 0; b < blocks; ++b)
                form(xt + b * packed, w + n * K, rows, K, y + b * TILE * N + n, N, int(std::min<int64_t>(TILE, T - b * TILE)));
        }
        _tile_release();
    }
}
#endif
