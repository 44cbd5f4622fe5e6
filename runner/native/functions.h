// Elementary functions of vectors of floats.

#ifndef KVCORE_FUNCTIONS_H
#define KVCORE_FUNCTIONS_H

#include "tile.h"

// e^x of values that are not above 0; a relative error of about 2^-23. Where x <= -87 it is e^-87, next to nothing.
static inline lanes exp_of_negative(lanes x)
{
    const int_lanes tiny = x < -87.0f;
    x = (lanes)(((int_lanes)x & ~tiny) | ((int_lanes)((lanes){0} - 87.0f) & tiny));
    // x = n ln 2 + r, |r| <= ln 2 / 2. The first part of ln 2 has few digits, so that n times it is exact.
    const int_lanes n = __builtin_convertvector(x * 1.44269504f - 0.5f, int_lanes);
    const lanes times = __builtin_convertvector(n, lanes);
    const lanes r = (x - times * 0.693359375f) + times * 2.12194440e-4f;
    // The Taylor series: the first term left out is below 2^-25.
    lanes sum = r * (1.0f / 5040) + 1.0f / 720;
    sum = sum * r + 1.0f / 120;
    sum = sum * r + 1.0f / 24;
    sum = sum * r + 1.0f / 6;
    sum = sum * r + 0.5f;
    sum = sum * r + 1.0f;
    sum = sum * r + 1.0f;
    return (lanes)((int_lanes)sum + (n << 23));
}

static inline lanes tanh_of(lanes x)
{
    const int_lanes sign = (int_lanes)x & INT32_MIN;
    const lanes negative = (lanes)((int_lanes)x | INT32_MIN);  // -|x|
    const lanes power = exp_of_negative(2 * negative);
    return (lanes)((int_lanes)((1 - power) / (1 + power)) | sign);
}

// x / (1 + e^-x)
static inline lanes silu_of(lanes x)
{
    // Below -100 it is next to nothing; but exp_of_negative ends at e^-87, and times a huge x that is not.
    const int_lanes huge = x < -100.0f;
    x = (lanes)(((int_lanes)x & ~huge) | ((int_lanes)((lanes){0} - 100.0f) & huge));
    const int_lanes negative = x < 0.0f;
    const lanes power = exp_of_negative((lanes)((int_lanes)x | INT32_MIN));  // e^-|x|
    // e^-|x| where x is negative, else 1.
    const lanes share = (lanes)(((int_lanes)power & negative) | ((int_lanes)((lanes){0} + 1.0f) & ~negative));
    return x * share / (1 + power);
}

// GELU, x times the share of the normal distribution below x, in its approximation by tanh
// (https://arxiv.org/abs/1606.08415, section 2).
static inline lanes gelu_tanh_of(lanes x)
{
    return 0.5f * x * (1 + tanh_of(0.797884561f * (x + 0.044715f * x * x * x)));
}

#endif
