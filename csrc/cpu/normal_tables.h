// The normal law's lower tail in 32 polynomials, for instruction sets that look up 32 floats at
// once: no exponential, and half the operations of one.
#pragma once

namespace fastbert {

// Piece i holds f(z) for z = (i + t) / kNormalPieces, |t| <= 1/2, as the sum of terms[d][i] t^d;
// in the last piece, where f is under 6e-9, it is 0.
constexpr float kNormalPieces = 16.0f / 3.0f;  // a unit of z

template <int kDegree>
struct NormalTable {
  alignas(64) float terms[kDegree + 1][32];
};

template <int kDegree>
struct NormalTables {
  NormalTable<kDegree> tail;   // Phi(-z)
  NormalTable<kDegree> slope;  // the slope of GELU at -z: Phi(-z) - z phi(z)
};

// To 5e-8 of the tail, and to 5e-4 of it (3e-5 above z = -3) for results rounded to bf16.
extern const NormalTables<6> kNormal;
extern const NormalTables<3> kBriefNormal;

}  // namespace fastbert
