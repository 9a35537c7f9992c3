// What is done row by row between the products: RMSNorm with the add before it, and placing queries, keys and values.
//
// RMSNorm (Zhang and Sennrich 2019): y = x / sqrt(mean(x^2) + eps) * weight.
// Rotary positions (Su et al. 2021), half-split: (a, b) -> (a cos - b sin, b cos + a sin) for a = x[i], b = x[i + D / 2].

#include "vector.h"

namespace {

constexpr int64_t ALONE = 16384;  // elements below which one thread is faster than two that must meet

void norm(const float* x, const float* weight, float eps, float* y, int64_t width) {
    Vector squares{};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) squares += load(x + i) * load(x + i);
    float total = sum(squares);
    for (; i < width; ++i) total += x[i] * x[i];
    const float factor = 1.f / __builtin_sqrtf(total / width + eps);
    for (i = 0; i < width; ++i) y[i] = x[i] * factor * weight[i];
}

}  // namespace

// sum [T, width] = x + residual, y = norm of sum.  `residual` may be null: then y = norm of x, and sum is not written.
extern "C" void add_rms_norm(const float* x, const float* residual, const float* weight, float eps, float* y, float* sum, int64_t T, int64_t width) {
#pragma omp parallel for schedule(static) if (T * width > ALONE)
    for (int64_t t = 0; t < T; ++t) {
        const float* row = x + t * width;
        if (residual) {
            float* out = sum + t * width;
            for (int64_t i = 0; i < width; ++i) out[i] = row[i] + residual[t * width + i];
            row = out;
        }
        norm(row, weight, eps, y + t * width, width);
    }
}

// qkv [T, heads + 2 * kv_heads, D] in place: norm of query and key heads (weights [D]; may be null), rotation by cos, sin [T, D / 2];
// then keys and values go to cache row rows[t] ([., 2 * kv_heads, D]: all keys, then all values).
extern "C" void place(float* qkv, int64_t T, int64_t heads, int64_t kv_heads, int64_t D, const float* query_norm, const float* key_norm,
                      float eps, const float* cos, const float* sin, float* cache, const int64_t* rows) {
    const int64_t width = (heads + 2 * kv_heads) * D, half = D / 2;
#pragma omp parallel for schedule(static) if (T * width > ALONE)
    for (int64_t t = 0; t < T; ++t) {
        float* row = qkv + t * width;
        const float *c = cos + t * half, *s = sin + t * half;
        for (int64_t h = 0; h < heads + kv_heads; ++h) {
            float *a = row + h * D, *b = a + half;
            if (query_norm) norm(a, h < heads ? query_norm : key_norm, eps, a, D);
            for (int64_t i = 0; i < half; ++i) {
                const float first = a[i], second = b[i];
                a[i] = first * c[i] - second * s[i];
                b[i] = second * c[i] + first * s[i];
            }
        }
        std::memcpy(cache + rows[t] * 2 * kv_heads * D, row + heads * D, 4 * 2 * kv_heads * D);
    }
}
