// Attention over the paged cache, read where it lies: out = softmax(q K^T * scale) V in float32, one token and one KV head at a time.
//
// A token attends to the first position + 1 tokens of its request, so decodes and chunks of prompts are the same thing, and a token's
// result does not depend on the others of the batch.  The query heads of one KV head go together (grouped-query attention, Ainslie et
// al. 2023): each key and value is read once for all of them.

#include "vector.h"

namespace {

// Where the keys of one request lie: `table` lists blocks of `size` tokens, `stride` floats from token to token.  `fetch`: they are not in
// a near cache yet, so whoever walks them first has the tokens after the next LANES fetched, all heads of them.
struct Pages {
    const float* cache;
    const int64_t* table;
    int64_t size, stride;
    bool fetch;
};

inline float largest(Vector v) {
    float out[LANES];
    store(out, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) out[i] = out[i] > out[i + width] ? out[i] : out[i + width];
    return out[0];
}

// Walks a request's tokens LANES at a time; absent ones are the first of the same call, so that what is read exists.
struct Walk {
    const Pages& pages;
    int64_t left, block = 0, inside = 0;
    int next(const float* token[LANES]) {
        const int count = int(std::min<int64_t>(LANES, left));
        for (int j = 0; j < count; ++j) {
            token[j] = pages.cache + (pages.table[block] * pages.size + inside) * pages.stride;
            if (++inside == pages.size) inside = 0, ++block;
        }
        for (int j = count; j < LANES; ++j) token[j] = token[0];
        left -= count;
        return count;
    }
};

// HEADS query heads [HEADS, WIDTH * LANES] over `length` tokens, keys at `key` floats into a token and values at `value`; scores
// [HEADS, room] is memory for them.
template <int WIDTH, int HEADS>
void attend(const float* query, const Pages& pages, int64_t key, int64_t value, int64_t length, float scale, float* out, float* scores,
            int64_t room) {
    constexpr int D = WIDTH * LANES;
    const float* tokens[2][LANES];
    Integers lane;
    for (int i = 0; i < LANES; ++i) lane[i] = i;
    Vector top[HEADS], result[HEADS][WIDTH] = {}, total[HEADS] = {};
    for (auto& one : top) one = all(-1e30f);
    Walk keys{pages, length};
    int count = keys.next(tokens[0]), side = 0;
    for (int64_t done = 0; done < length; done += LANES, side ^= 1) {
        const float** token = tokens[side];
        const bool more = done + LANES < length;
        const int coming = more ? keys.next(tokens[side ^ 1]) : 0;
        Vector products[HEADS][LANES];
        for (int j = 0; j < LANES; ++j) {
            if (more && pages.fetch)
                for (int64_t d = 0; d < pages.stride; d += 16) __builtin_prefetch(tokens[side ^ 1][j] + d, 0, 2);
            for (int h = 0; h < HEADS; ++h) {
                products[h][j] = load(query + h * D) * load(token[j] + key);
                for (int w = 1; w < WIDTH; ++w) products[h][j] += load(query + h * D + w * LANES) * load(token[j] + key + w * LANES);
            }
        }
        for (int h = 0; h < HEADS; ++h) {
            const Vector here = lane < count ? sums(products[h]) * scale : all(-1e30f);
            top[h] = here > top[h] ? here : top[h];
            store(scores + h * room + done, here);
        }
        count = coming;
    }
    for (auto& one : top) one = all(largest(one));
    Walk values{pages, length};
    for (int64_t done = 0; done < length; done += LANES) {
        const float** token = tokens[0];
        const int count = values.next(token);
        for (int h = 0; h < HEADS; ++h) {
            float* weights = scores + h * room + done;
            const Vector weight = exponential(load(weights) - top[h]);
            total[h] += lane < count ? weight : Vector{};
            store(weights, weight);
        }
        for (int j = 0; j < count; ++j)
            for (int h = 0; h < HEADS; ++h)
                for (int w = 0; w < WIDTH; ++w) result[h][w] += load(token[j] + value + w * LANES) * scores[h * room + done + j];
    }
    for (int h = 0; h < HEADS; ++h) {
        const float factor = 1.f / sum(total[h]);
        for (int w = 0; w < WIDTH; ++w) store(out + h * D + w * LANES, result[h][w] * factor);
    }
}

template <int WIDTH>
void attend_group(const float* query, const Pages& pages, int64_t key, int64_t value, int64_t length, float scale, float* out, int64_t group,
                  float* scores, int64_t room) {
    constexpr int D = WIDTH * LANES;
    for (int64_t h = 0; h < group;) {
        const int64_t left = group - h;
        const auto form = left == 1 ? attend<WIDTH, 1> : left == 2 ? attend<WIDTH, 2> : left == 3 ? attend<WIDTH, 3> : attend<WIDTH, 4>;
        form(query + h * D, pages, key, value, length, scale, out + h * D, scores, room);
        h += std::min<int64_t>(left, 4);
    }
}

}  // namespace

// query [T, heads, D] with `row` floats from token to token, cache [blocks, size, 2 * kv_heads, D], tables [slots, width] of blocks,
// slots and positions [T] -> out [T, heads, D].  D is 16, 32, 64, 128 or 256.
extern "C" void attention(const float* query, int64_t row, const float* cache, const int64_t* tables, int64_t width, const int64_t* slots,
                          const int64_t* positions, float* out, int64_t T, int64_t heads, int64_t kv_heads, int64_t D, int64_t size,
                          float scale) {
    const int64_t group = heads / kv_heads, stride = 2 * kv_heads * D, wide = D / LANES;
    const auto form = wide == 1 ? attend_group<1> : wide == 2 ? attend_group<2> : wide == 4 ? attend_group<4> : wide == 8 ? attend_group<8>
                    : wide == 16 ? attend_group<16> : attend_group<32>;
    const int64_t TOGETHER = T > 64 ? 8 : 1;  // tokens a thread takes at once: of a prompt's chunk they share their keys
    const int64_t room = (width * size + LANES - 1) / LANES * LANES;
    static thread_local Scratch held;
#pragma omp parallel
    {
        float* scores = held.get<float>(std::min<int64_t>(group, 4) * room);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < (T + TOGETHER - 1) / TOGETHER; ++i)
            for (int64_t t = i * TOGETHER; t < std::min(T, (i + 1) * TOGETHER); ++t)
                for (int64_t head = 0; head < kv_heads; ++head) {
                    const bool first = head == 0 && (t == i * TOGETHER || slots[t] != slots[t - 1]);
                    const Pages pages{cache, tables + slots[t] * width, size, stride, first};
                    form(query + t * row + head * group * D, pages, head * D, (kv_heads + head) * D, positions[t] + 1, scale,
                         out + (t * heads + head * group) * D, group, scores, room);
                }
    }
}
