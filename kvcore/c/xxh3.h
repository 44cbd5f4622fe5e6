// XXH3, 128 bits, seed 0, of 17 bytes and more: what a block's parent, tokens and extra keys come to at least.
//
// From the specification (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md, "XXH3 Algorithm Overview"),
// whose names are kept. The tests compare it with the package xxhash at every length.

#ifndef KVCORE_XXH3_H
#define KVCORE_XXH3_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define PRIME32_1 0x9E3779B1U
#define PRIME32_2 0x85EBCA77U
#define PRIME32_3 0xC2B2AE3DU
#define PRIME64_1 0x9E3779B185EBCA87ULL
#define PRIME64_2 0xC2B2AE3D27D4EB4FULL
#define PRIME64_3 0x165667B19E3779F9ULL
#define PRIME64_4 0x85EBCA77C2B2AE63ULL
#define PRIME64_5 0x27D4EB2F165667C5ULL
#define PRIME_MX1 0x165667919E3779F9ULL

#define SECRET_LENGTH 192
#define STRIPE_LENGTH 64
#define STRIPES_PER_BLOCK ((SECRET_LENGTH - STRIPE_LENGTH) / 8)
#define BLOCK_LENGTH (STRIPE_LENGTH * STRIPES_PER_BLOCK)

static const uint8_t DEFAULT_SECRET[SECRET_LENGTH] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

struct hash128 {
    uint64_t low, high;
};

static inline uint64_t read64(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap64(value);
#endif
    return value;
}

// The product's two halves, folded into one by XOR.
static inline uint64_t multiply_folded(uint64_t a, uint64_t b)
{
#ifdef __SIZEOF_INT128__
    const __uint128_t product = (__uint128_t)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
#else
    const uint64_t a_low = (uint32_t)a, a_high = a >> 32, b_low = (uint32_t)b, b_high = b >> 32;
    const uint64_t low = a_low * b_low;
    const uint64_t middle = a_high * b_low + (low >> 32);
    const uint64_t other = a_low * b_high + (uint32_t)middle;
    return ((other << 32) | (uint32_t)low) ^ (a_high * b_high + (middle >> 32) + (other >> 32));
#endif
}

static inline uint64_t avalanche(uint64_t h)
{
    h ^= h >> 37;
    h *= PRIME_MX1;
    return h ^ (h >> 32);
}

static inline uint64_t mix_step(const uint8_t *data, const uint8_t *secret)
{
    return multiply_folded(read64(data) ^ read64(secret), read64(data + 8) ^ read64(secret + 8));
}

static inline void mix_two_chunks(
    struct hash128 *acc, const uint8_t *first, const uint8_t *second, const uint8_t *secret)
{
    acc->low = (acc->low + mix_step(first, secret)) ^ (read64(second) + read64(second + 8));
    acc->high = (acc->high + mix_step(second, secret + 16)) ^ (read64(first) + read64(first + 8));
}

static inline struct hash128 finished(struct hash128 acc, size_t length)
{
    const uint64_t low = acc.low + acc.high;
    const uint64_t high = acc.low * PRIME64_1 + acc.high * PRIME64_4 + (uint64_t)length * PRIME64_2;
    return (struct hash128){avalanche(low), 0 - avalanche(high)};
}

// 17 to 128 bytes: pairs of chunks of 16, from the middle outwards.
static inline struct hash128 hash_small(const uint8_t *data, size_t length)
{
    struct hash128 acc = {length * PRIME64_1, 0};
    for (size_t pair = (length - 1) / 32 + 1; pair-- > 0;)
        mix_two_chunks(&acc, data + 16 * pair, data + length - 16 * (pair + 1), DEFAULT_SECRET + 32 * pair);
    return finished(acc, length);
}

// 129 to 240 bytes.
static inline struct hash128 hash_medium(const uint8_t *data, size_t length)
{
    struct hash128 acc = {length * PRIME64_1, 0};
    for (size_t i = 0; i < 4; i++)
        mix_two_chunks(&acc, data + 32 * i, data + 32 * i + 16, DEFAULT_SECRET + 32 * i);
    acc = (struct hash128){avalanche(acc.low), avalanche(acc.high)};
    for (size_t i = 4; i < length / 32; i++)
        mix_two_chunks(&acc, data + 32 * i, data + 32 * i + 16, DEFAULT_SECRET + 3 + 32 * (i - 4));
    mix_two_chunks(&acc, data + length - 16, data + length - 32, DEFAULT_SECRET + 103);
    return finished(acc, length);
}

static inline void accumulate(uint64_t acc[8], const uint8_t *stripe, const uint8_t *secret)
{
    for (int lane = 0; lane < 8; lane++) {
        const uint64_t data = read64(stripe + 8 * lane);
        const uint64_t value = data ^ read64(secret + 8 * lane);
        acc[lane ^ 1] += data;
        acc[lane] += (value & 0xFFFFFFFFU) * (value >> 32);
    }
}

static inline void scramble(uint64_t acc[8], const uint8_t *secret)
{
    for (int lane = 0; lane < 8; lane++)
        acc[lane] = (acc[lane] ^ (acc[lane] >> 47) ^ read64(secret + 8 * lane)) * PRIME32_1;
}

static inline uint64_t final_merge(const uint64_t acc[8], uint64_t result, const uint8_t *secret)
{
    for (int i = 0; i < 4; i++)
        result += multiply_folded(acc[2 * i] ^ read64(secret + 16 * i), acc[2 * i + 1] ^ read64(secret + 16 * i + 8));
    return avalanche(result);
}

static inline struct hash128 hash_large(const uint8_t *data, size_t length)
{
    uint64_t acc[8] = {
        PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1,
    };
    // The last stripe, whole or not, is the last 64 bytes: it is not among the others.
    const size_t stripes = (length - 1) / STRIPE_LENGTH;
    for (size_t i = 0; i < stripes; i++) {
        accumulate(acc, data + STRIPE_LENGTH * i, DEFAULT_SECRET + 8 * (i % STRIPES_PER_BLOCK));
        if (i % STRIPES_PER_BLOCK == STRIPES_PER_BLOCK - 1)
            scramble(acc, DEFAULT_SECRET + SECRET_LENGTH - STRIPE_LENGTH);
    }
    accumulate(acc, data + length - STRIPE_LENGTH, DEFAULT_SECRET + SECRET_LENGTH - STRIPE_LENGTH - 7);
    return (struct hash128){
        final_merge(acc, length * PRIME64_1, DEFAULT_SECRET + 11),
        final_merge(acc, ~(length * PRIME64_2), DEFAULT_SECRET + SECRET_LENGTH - STRIPE_LENGTH - 11),
    };
}

static inline struct hash128 xxh3_128(const uint8_t *data, size_t length)
{
    return length <= 128 ? hash_small(data, length) : length <= 240 ? hash_medium(data, length) : hash_large(data, length);
}

#endif
