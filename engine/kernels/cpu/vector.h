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
typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(LANES * sizeof(int32_t)), may_alias));

inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
inline void store(float* to, Vector value) { *reinterpret_cast<Vector*>(to) = value; }
inline Vector all(float value) { return value - Vector{}; }

inline float sum(Vector v) {
    float out[LANES];
    store(out, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) out[i] += out[i + width];
    return out[0];
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
