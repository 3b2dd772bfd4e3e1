-- Returns {states, counters}: flat lists of names and counts.
return {redis.call('HGETALL', key('states')), redis.call('HGETALL', key('counters'))}
