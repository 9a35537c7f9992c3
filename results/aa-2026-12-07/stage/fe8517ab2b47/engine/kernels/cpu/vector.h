// What the kernels share: a vector of float32 as wide as the CPU's registers, its exponential, memory that is kept between calls.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), may_alias));
typedef float Anywhere __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));  // a vector in memory of any alignment
typedef int32_t Integers __attribute__((vector_size(LANES * sizeof(int32_t)), may_alias));

inline Vector load(const float* from) { return *reinterpret_cast<const Anywhere*>(from); }
inline void store(float* to, Vector value) { *reinterpret_cast<Anywhere*>(to) = value; }
inline Vector all(float value) { return value - Vector{}; }

inline float sum(Vector v) {
    float out[LANES];
    store(out, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) out[i] += out[i + width];
    return out[0];
}

// Lanes of two vectors, one after the other: of every 2 * HALF the first (or second) HALF, from the first vector and from the second.
template <int HALF> struct Pattern {
    alignas(sizeof(Integers)) int32_t lanes[LANES];
    constexpr explicit Pattern(int second) : lanes{} {
        for (int lane = 0; lane < LANES; ++lane) {
            const int begin = lane / (2 * HALF) * (2 * HALF), place = lane % (2 * HALF);
            lanes[lane] = begin + second * HALF + (place < HALF ? place : LANES + place - HALF);
        }
    }
    Integers get() const { return *reinterpret_cast<const Integers*>(lanes); }
};

template <int HALF> inline Vector firsts(Vector a, Vector b) {
    static constexpr Pattern<HALF> pattern(0);
    return __builtin_shuffle(a, b, pattern.get());
}

template <int HALF> inline Vector seconds(Vector a, Vector b) {
    static constexpr Pattern<HALF> pattern(1);
    return __builtin_shuffle(a, b, pattern.get());
}

template <int HALF> inline void halve(Vector* v) {
    for (int i = 0; i < LANES / HALF / 2; ++i) v[i] = firsts<HALF>(v[2 * i], v[2 * i + 1]) + seconds<HALF>(v[2 * i], v[2 * i + 1]);
}

// Lane i: the sum of v[i]'s lanes.  Overwrites v.
inline Vector sums(Vector v[LANES]) {
    halve<1>(v);
    halve<2>(v);
    halve<4>(v);
    if constexpr (LANES == 16) halve<8>(v);
    return v[0];
}

template <int HALF> inline void exchange(Vector* v) {
    for (int i = 0; i < LANES; ++i)
        if (!(i & HALF)) {
            const Vector a = v[i], b = v[i + HALF];
            v[i] = firsts<HALF>(a, b);
            v[i + HALF] = seconds<HALF>(a, b);
        }
}

// Lane j of v[i] changes places with lane i of v[j].
inline void transpose(Vector v[LANES]) {
    exchange<1>(v);
    exchange<2>(v);
    exchange<4>(v);
    if constexpr (LANES == 16) exchange<8>(v);
}

// Rows as lanes: out[k * stride + r] = x[r, k] for r < LANES, rows that are not there as zero.
inline void transpose_rows(const float* x, int rows, int64_t K, float* out, int64_t stride) {
    int64_t k = 0;
    for (; k + LANES <= K; k += LANES) {
        Vector square[LANES];
        for (int r = 0; r < LANES; ++r) square[r] = r < rows ? load(x + r * K + k) : Vector{};
        transpose(square);
        for (int i = 0; i < LANES; ++i) store(out + (k + i) * stride, square[i]);
    }
    for (; k < K; ++k)
        for (int r = 0; r < LANES; ++r) out[k * stride + r] = r < rows ? x[r * K + k] : 0.f;
}

// exp(x) to about 1e-7 relative: x = n ln 2 + r with |r| <= ln(2) / 2, Taylor's series of degree 7 for exp(r); below -87 it is 0 or as good.
inline Vector exponential(Vector x) {
    const Vector low = all(-87.f), high = all(88.f), shift = all(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
    x = x < low ? low : x > high ? high : x;
    Vector n = (x * 1.44269504f + shift) - shift;
    Vector r = x - n * 0.693359375f + n * 2.12194440e-4f;  // ln 2 in two parts (Cody and Waite 1980)
    Vector p = all(1.f / 5040);
    p = p * r + 1.f / 720;
    p = p * r + 1.f / 120;
    p = p * r + 1.f / 24;
    p = p * r + 1.f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.f;
    p = p * r + 1.f;
    Integers exponent = (__builtin_convertvector(n, Integers) + 127) << 23;
    return p * (Vector)exponent;
}

// Memory that grows and is kept.
struct Scratch {
    void* data = nullptr;
    size_t size = 0;
    template <typename T> T* get(size_t count) {
        size_t bytes = (count * sizeof(T) + 4095) / 4096 * 4096;
        if (bytes > size) {
            std::free(data);
            data = std::aligned_alloc(4096, bytes);
            if (!data) std::abort();
            size = bytes;
        }
        return static_cast<T*>(data);
    }
};
