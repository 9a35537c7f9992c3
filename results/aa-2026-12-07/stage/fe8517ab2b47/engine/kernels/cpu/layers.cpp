// A decoder's layers in one call, from residual to residual, over memory that is kept: what the other files hold, in Llama's order.
//
//     x = x + W_o attention(place(W_qkv norm(x)))        x = x + W_down swiglu(W_gate_up norm(x))

#include "vector.h"

extern "C" {
void linear(const float* x, const float* w, float* y, int64_t T, int64_t K, int64_t N);
void swiglu(const float* x, const float* w, float* y, int64_t T, int64_t K, int64_t inner);
void add_rms_norm(const float* x, const float* residual, const float* weight, float eps, float* y, float* sum, int64_t T, int64_t width);
void place(float* qkv, int64_t T, int64_t heads, int64_t kv_heads, int64_t D, const float* query_norm, const float* key_norm, float eps,
           const float* cos, const float* sin, float* cache, const int64_t* rows);
void attention(const float* query, int64_t row, const float* cache, const int64_t* tables, int64_t width, const int64_t* slots,
               const int64_t* positions, float* out, int64_t T, int64_t heads, int64_t kv_heads, int64_t D, int64_t size, float scale);
}

// Weights of a layer; those of the heads' norms may be null.
struct Layer {
    const float *attention_norm, *query_norm, *key_norm, *qkv, *out, *mlp_norm, *gate_up, *down;
};

struct Shape {
    int64_t layers, hidden, heads, kv_heads, D, inner;
    float eps, scale;
};

namespace {

constexpr int64_t MOST = 1024;  // tokens that pass through a layer together: what they need in between stays small

}  // namespace

// x [T, hidden] in place; cos, sin [T, D / 2]; cache [layers, blocks, size, 2 * kv_heads, D] with `stride` floats a layer; tables
// [slots, width] of blocks; slots, positions and cache rows [T].  Of one request's tokens the earlier come first.
extern "C" void decoder(const Layer* layers, const Shape* shape, float* x, int64_t T, const float* cos, const float* sin, float* cache,
                        int64_t stride, int64_t size, const int64_t* tables, int64_t width, const int64_t* slots, const int64_t* positions,
                        const int64_t* rows) {
    static Scratch first, second, wide;
    const auto [count, hidden, heads, kv_heads, D, inner, eps, scale] = *shape;
    const int64_t parts = (T + MOST - 1) / MOST, most = (T + parts - 1) / parts, placed = (heads + 2 * kv_heads) * D;
    float* a = first.get<float>(most * std::max(hidden, heads * D));
    float* b = second.get<float>(most * hidden);
    float* c = wide.get<float>(most * std::max(placed, inner));
    for (const Layer* layer = layers; layer < layers + count; ++layer, cache += stride)
        for (int64_t t = 0; t < T; t += most) {
            const int64_t n = std::min(most, T - t);
            float* here = x + t * hidden;
            add_rms_norm(here, nullptr, layer->attention_norm, eps, a, nullptr, n, hidden);
            linear(a, layer->qkv, c, n, hidden, placed);
            place(c, n, heads, kv_heads, D, layer->query_norm, layer->key_norm, eps, cos + t * D / 2, sin + t * D / 2, cache, rows + t);
            attention(c, placed, cache, tables, width, slots + t, positions + t, a, n, heads, kv_heads, D, size, scale);
            linear(a, layer->out, b, n, heads * D, hidden);
            add_rms_norm(b, here, layer->mlp_norm, eps, a, here, n, hidden);
            swiglu(a, layer->gate_up, c, n, hidden, inner);
            linear(c, layer->down, b, n, inner, hidden);
#pragma omp parallel for schedule(static) if (n > 64)
            for (int64_t i = 0; i < n; ++i)
                for (int64_t j = 0; j < hidden; ++j) here[i * hidden + j] += b[i * hidden + j];
        }
}
