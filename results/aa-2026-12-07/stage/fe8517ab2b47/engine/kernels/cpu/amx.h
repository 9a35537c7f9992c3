// What the AMX forms of y = x W^T share.  A float32 number is the exact sum of three bfloat16 numbers (8 + 8 + 8 bits), so
//     x w = sum over planes i, j of x_i w_j,   bfloat16 products, float32 sums (TDPBF16PS, Intel ISA reference, AMX-BF16)
// without the terms i + j > 2, which are below float32's rounding of the largest.  (Splitting as in Henry, Tang, Heinecke 2019,
// arXiv:1904.06376.)
#pragma once

#include "vector.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define HAS_AMX 1
#include <immintrin.h>

// y [T, N] = x [T, K] W^T for few rows of x, and for many; `gated`: W is [2 * N, K], gates first, and y their SwiGLU.
void few_rows_amx(const float* x, const float* w, float* y, int64_t T, int64_t K, int64_t N);
void many_rows_amx(const float* x, const float* w, float* y, int64_t T, int64_t K, int64_t N, bool gated);

constexpr int TILE = 16, DEPTH = 32, PLANES = 3;     // a tile: 16 rows of 32 bfloat16 (or 16 float32); 1 KiB
constexpr size_t TILE_BYTES = 1024;

struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t columns[16] = {};
    uint8_t rows[16] = {};
    TileConfig() {
        for (int i = 0; i < 8; ++i) columns[i] = 64, rows[i] = 16;
    }
};

// Planes by rounding.
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

#endif
