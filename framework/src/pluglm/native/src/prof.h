#pragma once
#include <x86intrin.h>
#include <cstdio>
namespace pluglm { 
struct Prof { unsigned long long t[16]={}, n[16]={}; ~Prof(){ for(int i=0;i<16;i++) if(n[i]) fprintf(stderr,"prof %d: %.1f Mcyc n %llu per %.0f\n",i,t[i]/1e6,n[i],double(t[i])/n[i]); } };
inline Prof prof; inline bool prof_on=false;
struct In { int i; unsigned long long s; In(int i):i(i),s(__rdtsc()){} ~In(){ if(prof_on){prof.t[i]+=__rdtsc()-s; prof.n[i]++;} } };
}
